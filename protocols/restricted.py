"""Which kinds of requests a front door answers only to those who know a secret header. Pure.

Owns Triton's nine categories and the meaning of --http-restricted-api and --grpc-restricted-protocol. Doors ask
once for each category when they are made, so that nothing is looked at where nothing is restricted.
"""

from __future__ import annotations

import enum
import hmac
from typing import TYPE_CHECKING

import msgspec

from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterable


class Category(enum.Enum):
    """What belongs together in a restriction. The values are those of the flags."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


class Door(msgspec.Struct, frozen=True):
    """How the two protocols speak of restrictions."""

    flag: str
    #: What a category is called in the messages about the flag.
    feature: str
    #: Stands before the keys of the flag in the names of headers.
    prefix: str
    #: What a refused client reads, before the name of the header.
    refusal: str


HTTP = Door("http-restricted-api", "api", "", "This API is restricted, expecting header")
GRPC = Door(
    "grpc-restricted-protocol",
    "protocol",
    "triton-grpc-protocol-",
    "This protocol is restricted, expecting header",
)


class Restriction(msgspec.Struct, frozen=True):
    """The header that a category asks for."""

    #: As the operator wrote it. Names of HTTP headers have no case; metadata of gRPC is in lower case.
    header: str
    value: bytes
    #: What a client without it is told.
    message: str

    def admits(self, value: str | bytes | None) -> bool:
        """Whether a client that sent `value` in the header may go on; None stands for no header.

        Text is what was decoded with `surrogateescape`. How long it takes says nothing about the secret.
        """
        if value is None:
            return False
        given = value if isinstance(value, bytes) else value.encode(errors="surrogateescape")
        return hmac.compare_digest(given, self.value)


class Restrictions:
    """All restrictions of one front door; without any it is false."""

    def __init__(self, by_category: dict[Category, Restriction]) -> None:
        self._by_category = by_category

    def __bool__(self) -> bool:
        return bool(self._by_category)

    def of(self, category: Category) -> Restriction | None:
        """Return what `category` asks for, None where it is open to everybody."""
        return self._by_category.get(category)


def parse_restrictions(texts: Iterable[str], door: Door) -> Restrictions:
    """Return the restrictions that the values of a flag name, each `category,category:key=value`.

    Raises `BadOption` for a value of another form, and for a category that is unknown or comes twice.
    """
    found: dict[Category, Restriction] = {}
    for text in texts:
        names, header, value = _split(text, door)
        restriction = Restriction(door.prefix + header, value.encode(), f"{door.refusal} '{door.prefix}{header}'")
        for name in names.split(","):
            try:
                category = Category(name)
            except ValueError:
                raise BadOption(f"unknown restricted {door.feature} '{name}'") from None
            if category in found:
                raise BadOption(f"restricted {door.feature} '{name}' can not be specified in multiple config groups")
            found[category] = restriction
    return Restrictions(found)


def _split(text: str, door: Door) -> tuple[str, str, str]:
    names, _, rest = text.partition(":")
    header, _, value = rest.partition("=")
    if not (names and header and value):
        raise BadOption(f"--{door.flag} option format is '<config name>:<setting>=<value>'. Got {text}")
    return names, header, value
