"""HTTP in processes of its own: what moves between the kernel's process and a door, and the door's side.

A door serves inference on the fast path. Everything else (other calls, messages that aiohttp has to parse, models that
the door does not know, bodies for which it has no memory) is the kernel's: the connection itself moves to the kernel's
process, with what was received, and moves back at a later inference request. So both see the client's own socket, and
no message is parsed by two processes.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, cast

import msgspec

import protocols.http.light_aiohttp  # noqa: F401 - before the modules that import aiohttp
from protocols.access import Category, Restriction, Restrictions
from protocols.forwarding import make_forwarder
from protocols.http.browsers import BrowserRules, CorsPolicy, HostNames, parse_host_names
from protocols.http.fast.connection import FastConnection
from protocols.http.fast.fast_path import FastPath
from protocols.http.inference.infer_call import HttpInference
from protocols.http.request_rules import RequestRules
from protocols.listening import NewConnection, adopt, machine_names
from protocols.request_limits import RECEIVE_BUFFER_BYTE_SIZE

if TYPE_CHECKING:
    import socket

    from kernel.options import HttpOptions
    from protocols.frontend import DoorKernelInterface, DoorProcesses
    from protocols.http.fast.request_heads import KnownRequestHead
    from protocols.listening import Gate

#: How often the kernel gives a connection to a door. Then it keeps it: each move costs about 0.1 ms.
MOST_PASSES = 8

#: JSON of more bytes is decoded by a helper, and so served in the kernel's process.
_MOST_JSON_BYTE_SIZE = 512 << 10

#: How long the adoption of a connection may take; it takes an iteration or two of the event loop.
_ADOPTION_S = 1.0

#: How many times larger than its text a tensor in JSON can be: `1,` becomes eight bytes.
_MOST_GROWTH = 4


class HttpDoorSettings(msgspec.Struct, frozen=True):
    """What the HTTP server of a door needs of the options."""

    max_input_size: int
    header_forward_pattern: str
    cors_origins: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    #: Whether only programs on this machine reach the port.
    loopback_only: bool
    log_access: bool
    #: The header that inference requests must have; None if they need none.
    restriction: Restriction | None


def door_settings(options: HttpOptions, rules: RequestRules, *, loopback_only: bool, log_access: bool) -> bytes:
    """Return the settings of doors, for `open_connections`."""
    return msgspec.msgpack.encode(
        HttpDoorSettings(
            options.max_input_size, options.header_forward_pattern, options.cors_origins, options.allowed_hosts,
            loopback_only, log_access, rules.restrictions.of(Category.INFERENCE),
        )
    )  # fmt: skip


# ---- in the kernel's process -----------------------------------------------------------------


class ToDoors:
    """Lets connections in the kernel's process move to doors. A `protocols.http.fast.fast_path.ConnectionMoves`."""

    remembers = False
    serves_all = True

    def __init__(self, doors: DoorProcesses) -> None:
        self._doors = doors

    def wanted(self, connection: FastConnection, known: KnownRequestHead | None) -> bool:
        """Whether the next message of a connection, with this head, is better served by a door."""
        if known is None or known.infer is None or connection.passes >= MOST_PASSES:
            return False
        if connection.stays:  # a door could not serve this one
            connection.stays = False
            return False
        infer = known.infer
        return (
            self._doors.available
            and self._doors.serves(infer.model_name, infer.model_version)
            and infer.header_length <= _MOST_JSON_BYTE_SIZE
        )

    def move(self, connection: FastConnection, transport: asyncio.Transport, received: bytes) -> bool:
        return self._doors.give(transport, received, connection.passes + 1)


async def take_back(
    make_local: FastConnectionMaker, sock: socket.socket, received: bytes, passes: int, *, stays: bool,
    gate: Gate | None = None,
) -> None:  # fmt: skip
    """Serve a connection that comes from another process, from `received` on; `stays` is for its first message.

    `gate` refuses it where no descriptor is left for it.
    """

    def adopted() -> asyncio.BaseProtocol:
        return _Adopted(make_local(), received, passes, stays=stays)

    def connect() -> asyncio.BaseProtocol:
        return adopted() if gate is None else NewConnection(gate, adopted)

    await adopt(sock, connect)


class _Adopted(asyncio.Protocol):
    """A connection that comes from another process, before it has its protocol."""

    def __init__(self, connection: FastConnection, received: bytes, passes: int, *, stays: bool) -> None:
        connection.passes, connection.stays = passes, stays
        self._connection = connection
        self._received = received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        _serve(self._connection, cast("asyncio.Transport", transport))
        if self._received:
            self._connection.data_received(self._received)  # before anything else is read


def _serve(connection: FastConnection, transport: asyncio.Transport) -> None:
    transport.set_protocol(connection)
    connection.connection_made(transport)


# ---- in a door -------------------------------------------------------------------------------


class _ToKernel:
    """Lets connections of a door move to the kernel's process. A `ConnectionMoves`."""

    remembers = True
    serves_all = False

    def __init__(self, kernel: DoorKernelInterface) -> None:
        self._kernel = kernel

    def wanted(self, connection: FastConnection, known: KnownRequestHead | None) -> bool:
        """Whether the kernel serves the next message of a connection, with this head."""
        if known is None:
            return True
        infer = known.infer
        if infer is None:
            return known.refusal is None
        json_byte_size = infer.header_length
        if json_byte_size > _MOST_JSON_BYTE_SIZE:
            return True
        received = infer.body_byte_size if infer.body_byte_size >= RECEIVE_BUFFER_BYTE_SIZE else 0
        tensors = _MOST_GROWTH * json_byte_size if json_byte_size == infer.body_byte_size else infer.body_byte_size
        return not self._kernel.has_room_for(infer.route, max(received, tensors))

    def move(self, connection: FastConnection, transport: asyncio.Transport, received: bytes) -> bool:
        return self._kernel.give_back(transport, received, connection.passes)


class DoorConnections:
    """The connections of a door."""

    def __init__(self, kernel: DoorKernelInterface, settings: HttpDoorSettings) -> None:
        cors = CorsPolicy(settings.cors_origins) if settings.cors_origins else None
        names = HostNames(machine_names(), parse_host_names(settings.allowed_hosts), settings.loopback_only)
        restricted = {} if settings.restriction is None else {Category.INFERENCE: settings.restriction}
        rules = RequestRules(
            Restrictions(restricted), make_forwarder(settings.header_forward_pattern), cors, BrowserRules(names, cors)
        )
        inference = HttpInference(kernel, settings.max_input_size, forwards=rules.forwarder is not None)
        self._fast_path = FastPath(inference, rules, log_access=settings.log_access)
        self._fast_path.moves = _ToKernel(kernel)
        #: The calls of `adopt` that run.
        self._adopting: set[asyncio.Task[None]] = set()

    @property
    def connection_count(self) -> int:
        return self._fast_path.connection_count

    async def adopt(self, sock: socket.socket, received: bytes, passes: int) -> None:
        """Serve a connection of a client from now on."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._adopting.add(task)
        try:
            await take_back(functools.partial(FastConnection, self._fast_path), sock, received, passes, stays=False)
        finally:
            self._adopting.discard(task)

    async def close(self, grace_s: float) -> None:
        """Close idle connections, and others when their requests have responses or `grace_s` seconds are over."""
        if self._adopting:  # connections that came before
            await asyncio.wait(self._adopting, timeout=_ADOPTION_S)
        await self._fast_path.close(grace_s)


def open_connections(kernel: DoorKernelInterface, settings: bytes) -> DoorConnections:
    """Return what serves the connections of a door. `settings` come from `door_settings`."""
    return DoorConnections(kernel, msgspec.msgpack.decode(settings, type=HttpDoorSettings))


if TYPE_CHECKING:
    from collections.abc import Callable

    FastConnectionMaker = Callable[[], FastConnection]
