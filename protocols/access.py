"""Who a client is, and which requests a front door serves only to clients with a secret header or on the same machine.

- `Peer` is the client of a connection, for the limit and the ownership of shared memory regions: a user of this
  machine, or an address. Clients on this machine all have the same address, or can choose any (127.0.0.2 and so on). So
  they are identified by the user who has opened the connection. The system knows it for Unix sockets (unix(7),
  SO_PEERCRED) and for TCP over loopback (sock_diag(7)).
- `KeyReader` reads keys as the operator gives them: as text, in a file, or in an environment variable. A key on the
  command line can be read by every user of the machine (`ps`), one in a file or a variable cannot.
- `Restrictions.refusal` decides for both protocols. Here are Triton's nine categories, one more for the metrics, and
  the meaning of --http-restricted-api, --grpc-restricted-protocol, --admin-access and --admin-key.
- `describe_exposure` makes the log line at start that says who may administer the server.
"""

from __future__ import annotations

import enum
import hmac
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import (
    BadOption,
    InvalidArgument,
    NoDescriptorLeft,
    RequestCancelled,
    ServingError,
    lacks_descriptors,
)
from protocols.listening import is_local, listening_address

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kernel.options import AdminOptions, TlsOptions
    from kernel.serving.interface import KernelInterface

    #: Returns the value of a request header by its name in any case of letters, None if it is absent.
    Header = Callable[[str], str | bytes | None]

#: Clients of this machine whose user the system does not say.
LOOPBACK = "loopback"

_CLIENT_GONE = "the client has closed the connection"

_NETLINK_SOCK_DIAG = 4

_SOCK_DIAG_BY_FAMILY = 20

_NLM_F_REQUEST = 1

_ALL_STATES = 0xFFFFFFFF

#: nlmsghdr, and where in the inet_diag_msg behind it the user id stands, and then the inode (linux/inet_diag.h).
_MESSAGE_HEAD = struct.Struct("=IHHII")

_UID_OFFSET = _MESSAGE_HEAD.size + 4 + 48 + 3 * 4


def peer_identity(transport: asyncio.BaseTransport | None) -> str:
    """Return who the client of a connection is, such as `user 1000` or `192.0.2.1`.

    Asks the system with up to three system calls; call it once for a connection. Raises `ServingError` if the client
    has closed the connection, so that its user is not known any more, or if no file descriptor is left to ask with.
    """
    if transport is None:  # aiohttp forgets the transport of a lost connection
        raise RequestCancelled(_CLIENT_GONE)
    peer = transport.get_extra_info("peername")
    if not is_local(peer):
        return _address(peer)
    uid = _user_of(transport.get_extra_info("socket"), peer)
    return LOOPBACK if uid is None else f"user {uid}"


class Peer:
    """The client of a connection, determined when it is first needed."""

    __slots__ = ("_identity", "_transport")

    def __init__(self, transport: asyncio.BaseTransport | None, identity: str | None = None) -> None:
        """`identity` is what is known already, None for nothing."""
        self._transport = transport
        self._identity = identity

    @property
    def identity(self) -> str:
        """The client, as `peer_identity` returns it. Raises `ServingError`."""
        if self._identity is None:
            self._identity = peer_identity(self._transport)
        return self._identity


def _address(peer: object) -> str:
    """Return an address without port and zone, an IPv4 address that is written as IPv6 as IPv4."""
    if not isinstance(peer, tuple) or not peer:
        return "unknown"
    text = str(peer[0]).partition("%")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return str(getattr(address, "ipv4_mapped", None) or address)


def _user_of(sock: Any, peer: Any) -> int | None:
    """Return the user id of the process at the other end, None if the system does not say. Raises `ServingError`."""
    try:
        if sock.family == socket.AF_UNIX:
            _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return int(uid)
        return user_of_tcp(sock.family, peer, sock.getsockname())
    except OSError as error:
        if lacks_descriptors(error):  # must not make a client another one
            raise NoDescriptorLeft from None
        return None  # no netlink in this container, or the connection is lost


def user_of_tcp(family: int, client: tuple[Any, ...], server: tuple[Any, ...]) -> int | None:
    """Return the user id of the client's socket of a TCP connection within this machine; None if there is none.

    Raises `OSError`, and `RequestCancelled` if the client has closed its socket.
    """
    ends = struct.pack("!HH", client[1], server[1])
    for address in (client[0], server[0]):
        ends += socket.inet_pton(family, address.partition("%")[0]).ljust(16, b"\0")
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
    request += ends + struct.pack("=I", 0) + b"\xff" * 8  # any interface, any cookie
    head = _MESSAGE_HEAD.pack(_MESSAGE_HEAD.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
        netlink.setblocking(False)  # the response is there when `send` returns
        netlink.send(head + request)
        response = netlink.recv(4096)
    if _MESSAGE_HEAD.unpack_from(response)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    uid, inode = struct.unpack_from("=II", response, _UID_OFFSET)
    if not inode:  # no process has the socket any more, and the system says 0 in place of the user
        raise RequestCancelled(_CLIENT_GONE)
    return int(uid)


#: The most bytes of a key: clients send it in a header, and servers limit those.
_MAX_BYTE_SIZE = 4096


class KeyReader:
    """Reads keys, each source once: two front doors may have the same, and a pipe can be read only once."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._keys: dict[str, bytes] = {}

    def read(self, text: str, flag: str) -> bytes:
        """Return the key that `text`, from the value of `flag`, stands for. Raises `BadOption`, which names the flag.

        `@FILE` is the content of a file without the line end behind it, `$NAME` an environment variable; `@@` and `$$`
        begin a text with one `@` or `$`. Any other text is the key itself.
        """
        found = self._keys.get(text)
        if found is None:
            found = self._keys[text] = self._read(text, flag)
        return found

    def _read(self, text: str, flag: str) -> bytes:
        if text.startswith(("@@", "$$")):
            key, source = text[1:].encode(), "the text"
        elif text.startswith("@"):
            key, source = _file_content(text[1:], flag), f"the file '{text[1:]}'"
        elif text.startswith("$"):
            key = os.fsencode(self._environment.get(text[1:], ""))
            source = f"the environment variable '{text[1:]}'"
        else:
            key, source = text.encode(errors="surrogateescape"), "the text"
        if not key:
            raise BadOption(f"--{flag}: {source} has no key: it is empty or not set")
        if len(key) > _MAX_BYTE_SIZE:
            raise BadOption(f"--{flag}: {source} has more than {_MAX_BYTE_SIZE} bytes, which is too long for a key")
        if any(octet < 0x20 or octet == 0x7F for octet in key) or key != key.strip(b" "):
            raise BadOption(
                f"--{flag}: the key in {source} has a line end, another control character, or a space at its beginning "
                "or end, which clients cannot send in a header"
            )
        return key


def _file_content(path: str, flag: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTE_SIZE + 3)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadOption(f"--{flag}: the file '{path}' with the key cannot be read: {reason}") from None
    return content.removesuffix(b"\n").removesuffix(b"\r")


class Category(enum.Enum):
    """Requests that are restricted together. The values stand in the flags."""

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


#: Nothing is restricted.
EVERY_CLIENT = AdminAccess()


class Restrictions:
    """All restrictions of one front door. False if there are none."""

    def __init__(self, by_category: dict[Category, Restriction], admin: AdminAccess = EVERY_CLIENT) -> None:
        self._by_category = by_category
        self.admin = admin

    def __bool__(self) -> bool:
        return bool(self._by_category) or self.restricts_admin

    @property
    def restricts_admin(self) -> bool:
        """Whether some clients may not administer the server."""
        return self.admin != EVERY_CLIENT

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
    """Return the restrictions that the values of a flag (each `category,category:key=value`) and `admin` name.

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
    return Restrictions(found, EVERY_CLIENT if admin is None else _admin_access(admin, protocol, keys))


def _admin_access(options: AdminOptions, protocol: RestrictedProtocol, keys: KeyReader) -> AdminAccess:
    if options.access == "local":
        return AdminAccess(
            local_message=f"{protocol.subject} is restricted to clients on the server's machine (--admin-access=local)"
        )
    if options.access == "key":
        return AdminAccess(key=_restriction(ADMIN_HEADER, keys.read(options.key, "admin-key"), protocol))
    return EVERY_CLIENT


def _restriction(key: str, value: bytes, protocol: RestrictedProtocol) -> Restriction:
    header = protocol.prefix + key
    return Restriction(header, value, f"{protocol.subject} is restricted, expecting header '{header}'")


def _split(text: str, protocol: RestrictedProtocol) -> tuple[str, str, str]:
    names, _, rest = text.partition(":")
    header, _, value = rest.partition("=")
    if not (names and header and value):
        raise BadOption(f"--{protocol.flag} option format is '<config name>:<setting>=<value>'. Got {text}")
    return names, header, value


class OpenPort(msgspec.Struct, frozen=True):
    """A port on which clients may administer the server."""

    #: Such as `HTTP at 0.0.0.0:8000`.
    title: str
    restrictions: Restrictions
    #: Whether only programs on this machine reach it.
    loopback_only: bool = False
    #: Whether only clients with a certificate reach it.
    wants_certificates: bool = False
    #: What can be done over it; None for everything.
    categories: frozenset[Category] | None = None

    def admits(self, category: Category) -> bool:
        """Whether requests of `category` can be sent over the port, and are not restricted."""
        return (self.categories is None or category in self.categories) and self.restrictions.of(category) is None

    @property
    def in_network(self) -> bool:
        """Whether everyone in the network reaches it."""
        return not (self.loopback_only or self.wants_certificates)


def open_port(name: str, sock: socket.socket, tls: TlsOptions | None, restrictions: Restrictions) -> OpenPort:
    """Return the port of a front door called `name`, which listens on the bound `sock`."""
    title = f"{name} at {listening_address(sock)}"
    return OpenPort(title, restrictions, is_local(sock.getsockname()), tls is not None and tls.mutual)


class Exposure(msgspec.Struct, frozen=True):
    """The line for the log. It is a warning if everyone in the network may administer the server."""

    text: str
    is_warning: bool = False


def describe_exposure(ports: Sequence[OpenPort], *, explicit: bool, client_shm: str) -> Exposure:
    """Return the line of the start. `explicit` is the model control mode, `client_shm` --allow-client-shm."""
    actions = dict(_actions(explicit=explicit, client_shm=client_shm))
    listed = _join(list(actions.values()), "and")
    admin = next((port.restrictions.admin for port in ports), None)
    if admin is not None and admin.local_message:
        return Exposure(f"only clients on this machine may {listed} (--admin-access=local)")
    if admin is not None and admin.key is not None:
        return Exposure(f"only clients with the key in the header '{ADMIN_HEADER}' may {listed} (--admin-access=key)")
    network = _clauses("every client in the network", actions, [port for port in ports if port.in_network])
    if network:
        closing = "start the server with --admin-access=local or --admin-access=key to close this"
        return Exposure(f"{network}: {closing}", is_warning=True)
    if client_shm == "local":  # those who reach a port of this machine alone may do it there
        actions[Category.SHARED_MEMORY] = _REGISTER
    others = _clauses(_few_clients(ports), actions, ports)
    if not others:
        return Exposure(f"nobody may {listed} without the key of a restriction")
    return Exposure(f"{others}: start the server with --admin-access=key to close this")


_REGISTER = "register shared memory"


def _few_clients(ports: Sequence[OpenPort]) -> str:
    """Return who can reach ports that are not open to everyone in the network."""
    found = ["on this machine"] if any(port.loopback_only for port in ports) else []
    found += ["with a certificate"] if any(port.wants_certificates for port in ports) else []
    return f"clients {' or '.join(found or ['on this machine'])}"  # who may register memory in any case


def _actions(*, explicit: bool, client_shm: str) -> Iterable[tuple[Category, str]]:
    """Yield what a client in the network may do unless it is restricted, with its category."""
    if explicit:
        yield Category.MODEL_REPOSITORY, "load and unload models, which run code"
    if client_shm == "true":
        yield Category.SHARED_MEMORY, _REGISTER
    yield Category.LOGGING, "change settings of the log"
    yield Category.TRACE, "change settings of traces"


def _clauses(who: str, actions: dict[Category, str], ports: Sequence[OpenPort]) -> str:
    """Return who may do what, with one clause for each set of ports; empty if nothing is open."""
    by_ports: dict[tuple[str, ...], list[str]] = {}
    for category, action in actions.items():
        titles = tuple(port.title for port in ports if port.admits(category))
        if titles:
            by_ports.setdefault(titles, []).append(action)
    return "; ".join(f"{who} may {_join(done, 'and')} ({', '.join(titles)})" for titles, done in by_ports.items())


def _join(parts: list[str], word: str) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {word} {parts[-1]}"


def check_traced_model(kernel: KernelInterface, name: str) -> None:
    """Raise `InvalidArgument`, with Triton's text, unless a version of the model `name` is ready."""
    try:
        ready = kernel.model_ready(name)
    except ServingError:
        ready = False
    if not ready:
        raise InvalidArgument(f"Request for unknown model : {name}")
