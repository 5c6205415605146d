"""The front doors of a server that are in processes of their own: started, watched, restarted, and given connections.

The kernel accepts connections itself and gives each to the door with the fewest. So its port listens whatever becomes
of the doors, few connections with much load are spread evenly, and without a door the kernel serves them itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import resource
import socket
from typing import TYPE_CHECKING

import msgspec

from backends.doors import messages
from backends.doors.kernel_end import DoorRequests
from backends.launch.launcher import Backoff
from backends.transport.channel import DescriptorLost, LoopChannel
from backends.transport.wire import PROTOCOL
from kernel.background import BackgroundTasks
from kernel.errors import ServingError
from kernel.loop.iteration_end import IterationEnd
from kernel.machine import own_command
from kernel.server_parts import DoorProcessFigures, DoorProcessList, ServerPart

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.launch.local_process import LocalProcess
    from backends.launch.spawning import SpawningLauncher
    from kernel.config.spec import ModelSpec
    from kernel.serving.catalog import Catalog
    from kernel.serving.interface import KernelInterface

logger = logging.getLogger(__name__)

#: What a door may have of the server's memory at first.
FIRST_BYTE_SIZE = 16 << 20

#: How often doors are asked whether they live, and after how many questions without a response they are killed.
_PING_S = 1.0
_MOST_PINGS = 10

#: A door with as many unanswered questions gets no more connections, and one that does not become ready is killed
#: after this many.
_LATE_PINGS = 3
_MOST_STARTING_PINGS = 60

#: After as many questions a door that ends is started again without delay.
_OLD = 10

#: How many models doors know before the first request for them.
_KNOWN_AHEAD = 64

#: How many descriptors of a door are for other things than connections: arenas and memory of workers.
_RESERVED_DESCRIPTORS = 1024

#: How long a door may take to end after its connections have.
_END_S = 5.0

_encode = msgspec.msgpack.Encoder().encode


class DoorSettings(msgspec.Struct, frozen=True):
    """What all doors of a server get."""

    arena_byte_size: int
    owned_regions: bool
    max_decompression_ratio: int
    #: `uvloop` or `asyncio`.
    event_loop: str


class _Door:
    """One door, from its start on. The next process with the same number is another object."""

    def __init__(self, pool: DoorPool, number: int, process: LocalProcess) -> None:
        self.pool = pool
        self.number = number
        self.process = process
        self.title = f"front door {number}"
        self.channel = LoopChannel(process.socket, self._received, self._disconnected)
        self.requests = DoorRequests(pool.kernel, self.channel, self.title)
        #: Whether it takes connections.
        self.ready = False
        self.state = messages.DoorState({}, {}, 0)
        #: How many connections it has got, by the name of their protocol.
        self.given: dict[str, int] = {}
        self.granted_byte_size = 0
        self.pings = 0
        #: How often it was asked whether it lives.
        self.age = 0
        self._handlers: dict[type, Callable[..., None]] = {
            messages.Infer: self.requests.infer,
            messages.ResponsesSent: self.requests.responses_sent,
            messages.ResponsesTaken: self.requests.responses_taken,
            messages.InferOnce: self.requests.infer_once,
            messages.FormAdded: self.requests.add_form,
            messages.FormsForgotten: self.requests.forget_forms,
            messages.CancelInfer: self.requests.cancel,
            messages.ArenaAdded: self.requests.add_arena,
            messages.ArenaRemoved: self.requests.remove_arena,
            messages.DoorReady: self._begin,
            messages.WantRoute: lambda message: pool.want_route(self, message.name, message.version),
            messages.WantMemory: self._want_memory,
            messages.MemoryReturned: self._take_memory_back,
            messages.Moved: self._take_connection_back,
            messages.CallsOpened: self._take_calls,
            messages.DoorState: self._note_state,
            messages.DoorLogged: self._log,
            messages.Pong: self._pong,
        }
        process.on_lost(lambda cause: pool.lost(self, cause))

    @property
    def connection_count(self) -> int:
        """How many connections it has, over all protocols."""
        return sum(map(self.connections_of, self.given))

    def connections_of(self, protocol: str) -> int:
        """How many connections of a protocol it has."""
        state = self.state
        return state.connections.get(protocol, 0) + self.given.get(protocol, 0) - state.taken.get(protocol, 0)

    def grant(self, byte_size: int) -> int:
        """Give the door `byte_size` more bytes of the server's memory if there are as many. Returns how many it got."""
        budget = self.pool.kernel.budget
        # A quarter stays for what the kernel receives itself.
        if budget.used_byte_size + byte_size > budget.limit_byte_size // 4 * 3:
            return 0
        budget.add(byte_size)
        self.granted_byte_size += byte_size
        return byte_size

    def _received(self, received: list[bytes]) -> None:
        handlers, decode = self._handlers, messages.from_door_decoder.decode
        for octets in received:
            message = decode(octets)
            handlers[type(message)](message)

    @property
    def takes_connections(self) -> bool:
        """Whether it is ready, and responds."""
        return self.ready and self.pings < _LATE_PINGS

    def _disconnected(self, problem: str | None) -> None:
        self.ready = False  # nothing is given to a closed channel
        if problem is not None:
            logger.error("%s is ended: %s", self.title, problem)
        self.process.kill()  # `lost` follows

    def _begin(self, message: messages.DoorReady) -> None:
        if message.protocol != PROTOCOL:
            raise ValueError(f"its code is {message.protocol}, and that of the server {PROTOCOL}")
        self.ready = True
        self.pings = 0
        self.pool.door_ready(self)

    def _want_memory(self, message: messages.WantMemory) -> None:
        if message.byte_size < 1:
            raise ValueError(f"a request for {message.byte_size} bytes of memory")
        self.channel.send(messages.Granted(self.grant(message.byte_size)))

    def _take_memory_back(self, message: messages.MemoryReturned) -> None:
        if not 0 < message.byte_size <= self.granted_byte_size:
            raise ValueError(f"{message.byte_size} bytes of memory come back, of {self.granted_byte_size}")
        self.granted_byte_size -= message.byte_size
        self.pool.kernel.budget.remove(message.byte_size)

    def _take_connection_back(self, message: messages.Moved) -> None:
        try:
            fd = self.channel.take_fd()
        except DescriptorLost:
            logger.warning("a connection is lost that %s gave back: no file descriptor is left for it", self.title)
            return
        self.pool.take_back(fd, message.received, message.passes)

    def _take_calls(self, message: messages.CallsOpened) -> None:
        try:
            fd = self.channel.take_fd()
        except DescriptorLost:
            logger.warning("calls are lost that %s passes on: no file descriptor is left for them", self.title)
            return
        self.pool.take_calls(fd, tuple(message.address) or "", message.identity)

    def _note_state(self, message: messages.DoorState) -> None:
        given = self.given
        if (
            any(not 0 <= count <= given.get(name, 0) for name, count in message.taken.items())
            or any(count < 0 for count in message.connections.values())
            or message.memory_refusals < 0
        ):
            raise ValueError(f"a state that cannot be, after connections {given}: {message}")
        self.state = message

    def _log(self, message: messages.DoorLogged) -> None:
        known = logging.getLogger().manager.loggerDict.get(message.name)  # a logger once made stays
        (known if isinstance(known, logging.Logger) else logger).log(
            message.level, "%s", message.text, extra=dict(message.fields)
        )

    def _pong(self, message: messages.Pong) -> None:
        self.pings = 0

    def close(self) -> None:
        """The process has ended: nothing of it is used any more."""
        self.ready = False
        self.channel.close()
        self.requests.close()
        self.pool.kernel.budget.remove(self.granted_byte_size)
        self.granted_byte_size = 0


def stream_socket(fd: int) -> socket.socket:
    """Return the socket of a descriptor that a door has sent. Raises ValueError for other files, which are closed."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        os.close(fd)
        raise ValueError(f"a connection that is no socket: {error.strerror}") from None
    if sock.type != socket.SOCK_STREAM:
        sock.close()
        raise ValueError("a connection that is no stream socket")
    return sock


class _Port:
    """What the front door of one protocol has of the doors. Implements `protocols.frontend.DoorProcesses`."""

    def __init__(self, pool: DoorPool, protocol: str) -> None:
        self._pool = pool
        self._protocol = protocol

    def open(
        self, module: str, settings: bytes, take_back: Callable[[socket.socket, bytes, int], None] | None,
        take_calls: Callable[[socket.socket, str | tuple[str | int, ...], str], None] | None = None,
    ) -> None:  # fmt: skip
        self._pool.open(_Opened(self._protocol, module, settings, take_back, take_calls))

    @property
    def available(self) -> bool:
        return self._pool.available

    def serves(self, name: str, version: str) -> bool:
        return self._pool.serves(name, version)

    def give(self, transport: asyncio.Transport, received: bytes, passes: int) -> bool:
        return self._pool.give(self._protocol, transport, received, passes)

    @property
    def connection_count(self) -> int:
        return self._pool.connection_count(self._protocol)

    async def drain(self, grace_s: float) -> None:
        await self._pool.drain(grace_s)


class _Opened(msgspec.Struct):
    """A protocol that doors serve."""

    name: str
    module: str
    settings: bytes
    take_back: Callable[[socket.socket, bytes, int], None] | None
    take_calls: Callable[[socket.socket, str | tuple[str | int, ...], str], None] | None

    @property
    def message(self) -> messages.ProtocolOpened:
        return messages.ProtocolOpened(self.name, self.module, self.settings)


class DoorPool(ServerPart):
    """All doors of a server."""

    def __init__(
        self, kernel: KernelInterface, catalog: Catalog, launcher: SpawningLauncher, count: int, settings: DoorSettings
    ) -> None:
        self.kernel = kernel
        self._catalog = catalog
        self._launcher = launcher
        self._count = count
        self._settings = settings
        #: In the order in which they were opened.
        self._protocols: list[_Opened] = []
        #: By their numbers, from 1 on; those that do not live are missing.
        self._doors: dict[int, _Door] = {}
        self._starts: dict[int, Backoff] = {}
        self._tasks = BackgroundTasks()
        #: What doors know: name and version as clients give them → the specification.
        self._routes: dict[tuple[str, str], ModelSpec] = {}
        self._updates = False
        self._timer: asyncio.TimerHandle | None = None
        self._verbose = 0
        self._draining = self._closed = False
        self._all_ended = asyncio.Event()
        self._restarts = 0
        #: Of each door, which has as many descriptors as this process.
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_connections = max(descriptors // 2, descriptors - _RESERVED_DESCRIPTORS)
        #: Counts of doors that have ended.
        self._earlier_requests: dict[int, int] = {}
        self._earlier_refusals = 0

    # ---- for the front doors in the kernel's process ---------------------------------------------

    def port(self, protocol: str) -> _Port:
        """Return what the front door of a protocol uses, `http` or `grpc`."""
        return _Port(self, protocol)

    def open(self, opened: _Opened) -> None:
        """Let doors serve a protocol. With the first one they are started."""
        self._protocols.append(opened)
        if len(self._protocols) > 1:
            for door in self._doors.values():
                door.channel.send(opened.message)
            return
        self._verbose = self.kernel.log.values.log_verbose_level
        self._catalog.on_change.append(self._catalog_changed)
        self._update_routes()
        for number in range(1, self._count + 1):
            self._starts[number] = Backoff()
            self._start_soon(number, self._starts[number].next_delay_s())
        self._timer = asyncio.get_running_loop().call_later(_PING_S, self._tick)

    @property
    def available(self) -> bool:
        """Whether a door takes connections."""
        return not self._draining and any(door.takes_connections for door in self._doors.values())

    def serves(self, name: str, version: str) -> bool:
        """Whether doors serve calls with one response for this model."""
        spec = self._routes.get((name, version))
        return spec is not None and not spec.decoupled

    def give(self, protocol: str, transport: asyncio.Transport, received: bytes, passes: int) -> bool:
        """Give the connection of `transport` to a door; then the transport is aborted, and the connection lives on.

        `received` has come and belongs to no message that was begun. `passes` is how often a door has got it, this time
        included. Returns False if there is no door, or no descriptor: then nothing has changed.
        """
        ready = [
            door
            for door in self._doors.values()
            if door.takes_connections and door.connection_count < self._most_connections
        ]
        sock = transport.get_extra_info("socket")
        if self._draining or not ready or sock is None:
            return False
        # Those of one protocol are spread evenly: a few channels of gRPC can have all the load.
        door = min(ready, key=lambda each: (each.connections_of(protocol), each.connection_count))
        try:
            door.channel.send_with_fd(messages.Connection(protocol, received, passes), sock.fileno())
        except OSError as error:
            logger.warning("a connection stays in the kernel's process: %s", error.strerror)
            return False
        door.given[protocol] = door.given.get(protocol, 0) + 1
        transport.abort()
        return True

    def connection_count(self, protocol: str) -> int:
        """How many connections of a protocol doors have."""
        return sum(door.connections_of(protocol) for door in self._doors.values())

    async def drain(self, grace_s: float) -> None:
        """Give doors no more connections, and end each when its requests have responses, or after `grace_s` seconds."""
        if not self._draining:  # else the front door of another protocol has begun it
            self._draining = True
            for door in self._doors.values():
                door.channel.send(messages.Drain(grace_s))
        try:
            async with asyncio.timeout(grace_s + _END_S):
                while self._doors:
                    self._all_ended.clear()
                    await self._all_ended.wait()
        except TimeoutError:
            logger.error("%d front doors did not end in time, and are killed", len(self._doors))

    # ---- the doors -------------------------------------------------------------------------------

    def _start_soon(self, number: int, delay_s: float) -> None:
        self._tasks.start(self._start(number, delay_s))

    async def _start(self, number: int, delay_s: float) -> None:
        """Start the door with this number; again if that fails."""
        while True:
            await asyncio.sleep(delay_s)
            if self._draining or self._closed:
                return
            try:
                # It blocks for a millisecond, as the start of each process.
                process = self._launcher.start(
                    f"front door {number}", own_command("backends.doors"), [f"--event-loop={self._settings.event_loop}"]
                )
            except OSError as error:
                delay_s = self._starts[number].next_delay_s()
                logger.error("front door %d could not be started: %s", number, error.strerror)
                continue
            self._configure(_Door(self, number, process))
            return

    def _configure(self, door: _Door) -> None:
        self._doors[door.number] = door
        settings = self._settings
        door.channel.send(
            messages.Configure(
                settings.arena_byte_size, settings.owned_regions, settings.max_decompression_ratio, self._verbose,
                door.grant(FIRST_BYTE_SIZE),
            )
        )  # fmt: skip
        for opened in self._protocols:
            door.channel.send(opened.message)
        door.channel.send(messages.RoutesChanged(self._route_texts()))

    def door_ready(self, door: _Door) -> None:
        """A door takes connections from now on."""
        logger.log(logging.INFO, "%s takes connections", door.title)

    def lost(self, door: _Door, cause: str) -> None:
        """The process of a door has ended."""
        door.channel.read_rest()  # it may have given connections back
        self._doors.pop(door.number, None)
        open_count = door.requests.open_count
        self._earlier_requests[door.number] = self._earlier_requests.get(door.number, 0) + door.requests.count
        self._earlier_refusals += door.state.memory_refusals
        door.close()
        if not self._doors:
            self._all_ended.set()
        if self._draining or self._closed:
            return
        self._restarts += 1
        logger.error(
            "%s was lost (%s), and with it its connections: %d requests are cancelled; it is started again",
            door.title, cause, open_count,
        )  # fmt: skip
        self._start_soon(door.number, self._starts[door.number].next_delay_s())

    def take_back(self, fd: int, received: bytes, passes: int) -> None:
        """Serve a connection in the kernel's process that a door gives back. Raises ValueError for another file."""
        sock = stream_socket(fd)
        take_back = next((each.take_back for each in self._protocols if each.take_back is not None), None)
        if take_back is None:
            sock.close()
        else:
            take_back(sock, received, passes)

    def take_calls(self, fd: int, address: str | tuple[str | int, ...], identity: str) -> None:
        """Take calls of a client that a door passes on. Raises ValueError for a file that is no socket."""
        sock = stream_socket(fd)
        take_calls = next((each.take_calls for each in self._protocols if each.take_calls is not None), None)
        if take_calls is None or self._closed:
            sock.close()
        else:
            take_calls(sock, address, identity)

    def _tick(self) -> None:
        """Ask the doors whether they live, and tell them about the log."""
        self._timer = asyncio.get_running_loop().call_later(_PING_S, self._tick)
        verbose = self.kernel.log.values.log_verbose_level
        for door in list(self._doors.values()):
            if verbose != self._verbose:
                door.channel.send(messages.LogVerbose(verbose))
            door.pings += 1
            most = _MOST_PINGS if door.ready else _MOST_STARTING_PINGS
            if door.pings > most:
                problem = "responded" if door.ready else "become ready"
                logger.error("%s has not %s for %.0f s, and is killed", door.title, problem, most * _PING_S)
                door.ready = False
                door.process.kill()
            elif door.ready:
                door.channel.send(messages.Ping())
                door.age += 1
                if door.age == _OLD:
                    self._starts[door.number].reset()
        self._verbose = verbose

    # ---- routes ----------------------------------------------------------------------------------

    def want_route(self, door: _Door, name: str, version: str) -> None:
        """`door` has got a request for this model: tell all doors what it is, now and after each change."""
        if (name, version) in self._routes:
            return  # a message is on its way
        spec = self._spec_of(name, version)
        if spec is None:  # the kernel serves it
            door.channel.send(messages.RoutesChanged([messages.RouteText(name, version, b"")]))
            return
        if len(self._routes) >= messages.MOST_ROUTES:  # doors ask again for those that they need
            self._send_routes([messages.RouteText(*route, b"") for route in self._routes])
            self._routes.clear()
        self._routes[name, version] = spec
        self._send_routes([messages.RouteText(name, version, _encode(spec))])

    def _spec_of(self, name: str, version: str) -> ModelSpec | None:
        """Return what doors need to know of a model; None if the kernel serves its requests, or refuses them."""
        try:
            return self.kernel.route(name, version).spec
        except ServingError:
            return None

    def _route_texts(self) -> list[messages.RouteText]:
        return [messages.RouteText(*route, _encode(spec)) for route, spec in self._routes.items()]

    def _catalog_changed(self) -> None:
        if not self._updates and not self._closed:
            self._updates = True
            IterationEnd.current().add_decision(self._update_routes)

    def _update_routes(self) -> None:
        """Send what has changed of the routes that doors know."""
        self._updates = False
        changed: list[messages.RouteText] = []
        looked_at = [*self._routes, *(route for route in self._ahead() if route not in self._routes)]
        for route in looked_at:
            spec = self._spec_of(*route)
            if spec is self._routes.get(route):
                continue
            if spec is not None:
                self._routes[route] = spec
                changed.append(messages.RouteText(*route, _encode(spec)))
            else:
                del self._routes[route]
                changed.append(messages.RouteText(*route, b""))
        if changed:
            self._send_routes(changed)

    def _ahead(self) -> list[tuple[str, str]]:
        """Return routes that doors know before the first request."""
        if len(self._routes) >= _KNOWN_AHEAD:
            return []
        return [(name, "") for name in itertools.islice(self.kernel.catalog.ready_names(), _KNOWN_AHEAD)]

    def _send_routes(self, routes: list[messages.RouteText]) -> None:
        for door in self._doors.values():
            door.channel.send(messages.RoutesChanged(routes))

    # ---- kernel.server_parts.ServerPart ----------------------------------------------------------

    def figures(self) -> DoorProcessList:
        return DoorProcessList(
            self._restarts,
            self._earlier_refusals + sum(door.state.memory_refusals for door in self._doors.values()),
            [
                DoorProcessFigures(
                    number,
                    door.connection_count if door is not None else 0,
                    self._earlier_requests.get(number, 0) + (door.requests.count if door is not None else 0),
                    door.granted_byte_size if door is not None else 0,
                    door is not None and door.ready,
                    door.process.pid if door is not None else 0,
                )
                for number in range(1, self._count + 1)
                for door in [self._doors.get(number)]
            ],
        )

    async def close(self) -> None:
        """Kill what runs of the doors."""
        self._closed = self._draining = True
        if self._timer is not None:
            self._timer.cancel()
        if self._catalog_changed in self._catalog.on_change:
            self._catalog.on_change.remove(self._catalog_changed)
        await self._tasks.close()
        for door in list(self._doors.values()):
            await door.process.stop(0)
