"""Categories of requests that a front door serves only to clients with a secret header. Pure.

Owns Triton's nine categories and the meaning of --http-restricted-api and --grpc-restricted-protocol.
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
    """Requests that are restricted together. The values are those of the flags."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


class RestrictedProtocol(msgspec.Struct, frozen=True):
    """The words of one protocol for restrictions."""

    flag: str
    #: What error messages about the flag call a category.
    feature: str
    #: Prefix of header names: it stands before the keys of the flag.
    prefix: str
    #: The text of a refusal, before the name of the header.
    refusal: str


HTTP = RestrictedProtocol("http-restricted-api", "api", "", "This API is restricted, expecting header")
GRPC = RestrictedProtocol(
    "grpc-restricted-protocol",
    "protocol",
    "triton-grpc-protocol-",
    "This protocol is restricted, expecting header",
)


class Restriction(msgspec.Struct, frozen=True):
    """The header that requests of a category must have."""

    #: As the operator wrote it. Case does not matter in HTTP; gRPC's metadata is in lower case.
    header: str
    value: bytes
    #: The error for a client without it.
    message: str

    def admits(self, value: str | bytes | None) -> bool:
        """Whether a request with `value` in the header is admitted; None stands for no header.

        A text was decoded with `surrogateescape`. The time that this takes does not depend on the secret.
        """
        if value is None:
            return False
        given = value if isinstance(value, bytes) else value.encode(errors="surrogateescape")
        return hmac.compare_digest(given, self.value)


class Restrictions:
    """All restrictions of one front door. False where there are none."""

    def __init__(self, by_category: dict[Category, Restriction]) -> None:
        self._by_category = by_category

    def __bool__(self) -> bool:
        return bool(self._by_category)

    def of(self, category: Category) -> Restriction | None:
        """Return the restriction of `category`, None where all requests are admitted."""
        return self._by_category.get(category)


def parse_restrictions(texts: Iterable[str], protocol: RestrictedProtocol) -> Restrictions:
    """Return the restrictions that the values of a flag name, each `category,category:key=value`.

    Raises `BadOption` for a malformed value, and for a category that is unknown or comes twice.
    """
    found: dict[Category, Restriction] = {}
    for text in texts:
        names, key, value = _split(text, protocol)
        header = protocol.prefix + key
        restriction = Restriction(header, value.encode(), f"{protocol.refusal} '{header}'")
        for name in names.split(","):
            try:
                category = Category(name)
            except ValueError:
                raise BadOption(f"unknown restricted {protocol.feature} '{name}'") from None
            if category in found:
                feature = protocol.feature
                raise BadOption(f"restricted {feature} '{name}' can not be specified in multiple config groups")
            found[category] = restriction
    return Restrictions(found)


def _split(text: str, protocol: RestrictedProtocol) -> tuple[str, str, str]:
    names, _, rest = text.partition(":")
    header, _, value = rest.partition("=")
    if not (names and header and value):
        raise BadOption(f"--{protocol.flag} option format is '<config name>:<setting>=<value>'. Got {text}")
    return names, header, value
