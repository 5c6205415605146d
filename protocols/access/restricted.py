"""Which requests a front door serves only to clients with a secret header, or on the same machine. Pure.

Owns Triton's nine categories, that of the metrics, and the meaning of --http-restricted-api,
--grpc-restricted-protocol, --admin-access and --admin-key. `Restrictions.refusal` decides for both protocols.
"""

from __future__ import annotations

import enum
import hmac
from typing import TYPE_CHECKING

import msgspec

from kernel.options import AdminOptions, BadOption
from protocols.listening import is_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protocols.access.keys import KeyReader

    #: Returns the value of a request header by its name in any case of letters, None if it is absent.
    Header = Callable[[str], str | bytes | None]


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
    #: The metrics port, which is HTTP. Triton does not have the category.
    METRICS = "metrics"


class RestrictedProtocol(msgspec.Struct, frozen=True):
    """The words of one protocol for restrictions."""

    flag: str
    #: What error messages about the flag call a category.
    feature: str
    #: Prefix of header names: it stands before the keys of the flag.
    prefix: str
    #: The word for the refused request in the error.
    subject: str
    categories: frozenset[Category]


HTTP = RestrictedProtocol("http-restricted-api", "api", "", "This API", frozenset(Category))
GRPC = RestrictedProtocol(
    "grpc-restricted-protocol",
    "protocol",
    "triton-grpc-protocol-",
    "This protocol",
    frozenset(Category) - {Category.METRICS},
)

#: The header with the key of --admin-key, behind the prefix of the protocol.
ADMIN_HEADER = "admin-key"


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


class AdminAccess(msgspec.Struct, frozen=True):
    """Who may administer the server: load and unload models, change settings of logs and traces, register memory.

    By default every client.
    """

    #: The error for clients on other machines; empty if they are admitted.
    local_message: str = ""
    #: The header that clients must have; None if they need none.
    key: Restriction | None = None

    def refusal(self, header: Header, peer: object) -> str | None:
        """Return the error for a client that may not administer the server, None for one that may.

        `peer` is its address as the transport gives it.
        """
        if self.local_message and not is_local(peer):
            return self.local_message
        if self.key is not None and not self.key.admits(header(self.key.header)):
            return self.key.message
        return None


_EVERY_CLIENT = AdminAccess()


class Restrictions:
    """All restrictions of one front door. False if there are none."""

    def __init__(self, by_category: dict[Category, Restriction], admin: AdminAccess = _EVERY_CLIENT) -> None:
        self._by_category = by_category
        self.admin = admin

    def __bool__(self) -> bool:
        return bool(self._by_category) or self.restricts_admin

    @property
    def restricts_admin(self) -> bool:
        """Whether some clients may not administer the server."""
        return self.admin != _EVERY_CLIENT

    def of(self, category: Category) -> Restriction | None:
        """Return the restriction of `category`, None where all requests are admitted."""
        return self._by_category.get(category)

    def refusal(self, category: Category, header: Header, peer: object, *, administers: bool) -> str | None:
        """Return the error for a request that is refused, None for one that is admitted.

        `administers` is for requests that `AdminAccess` is about; `peer` matters only to them.
        """
        restriction = self._by_category.get(category)
        if restriction is not None and not restriction.admits(header(restriction.header)):
            return restriction.message
        return self.admin.refusal(header, peer) if administers else None


def parse_restrictions(
    texts: Iterable[str], protocol: RestrictedProtocol, keys: KeyReader, admin: AdminOptions | None = None
) -> Restrictions:
    """Return the restrictions that the values of a flag name, each `category,category:key=value`, and those of `admin`.

    Raises `BadOption` for a malformed value, for a category that is unknown or comes twice, and for a key that cannot
    be read.
    """
    found: dict[Category, Restriction] = {}
    known = {category.value: category for category in protocol.categories}
    for text in texts:
        names, key, value = _split(text, protocol)
        restriction = _restriction(key, keys.read(value, protocol.flag), protocol)
        for name in names.split(","):
            category = known.get(name)
            if category is None:
                raise BadOption(f"unknown restricted {protocol.feature} '{name}'")
            if category in found:
                feature = protocol.feature
                raise BadOption(f"restricted {feature} '{name}' can not be specified in multiple config groups")
            found[category] = restriction
    return Restrictions(found, _EVERY_CLIENT if admin is None else _admin_access(admin, protocol, keys))


def _admin_access(options: AdminOptions, protocol: RestrictedProtocol, keys: KeyReader) -> AdminAccess:
    if options.access == "local":
        return AdminAccess(
            local_message=f"{protocol.subject} is restricted to clients on the server's machine (--admin-access=local)"
        )
    if options.access == "key":
        return AdminAccess(key=_restriction(ADMIN_HEADER, keys.read(options.key, "admin-key"), protocol))
    return _EVERY_CLIENT


def _restriction(key: str, value: bytes, protocol: RestrictedProtocol) -> Restriction:
    header = protocol.prefix + key
    return Restriction(header, value, f"{protocol.subject} is restricted, expecting header '{header}'")


def _split(text: str, protocol: RestrictedProtocol) -> tuple[str, str, str]:
    names, _, rest = text.partition(":")
    header, _, value = rest.partition("=")
    if not (names and header and value):
        raise BadOption(f"--{protocol.flag} option format is '<config name>:<setting>=<value>'. Got {text}")
    return names, header, value
