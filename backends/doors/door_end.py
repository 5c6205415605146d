"""The door's end of its connection to the kernel, and the server as its protocol sees it.

`DoorKernel` is a `kernel.serving.interface.KernelInterface` for inference: it decides from what the kernel has pushed,
and nothing of a request waits for a question. What it does not know is served by the kernel: the connection moves.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import socket
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from backends.doors import messages
from backends.transport.channel import LoopChannel
from backends.transport.framing import MAX_KERNEL_FRAME
from kernel import errors
from kernel.config.spec import ModelSpec
from kernel.errors import ErrorCode, ServedElsewhere, ServingError, error_of
from kernel.loop.cancellations import Cancellations
from kernel.loop.clock import LoopClock, in_next_iteration
from kernel.loop.iteration_end import IterationEnd
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import ALIGNMENT, InputPlacer
from kernel.observe.internal_errors import unexpected_error
from kernel.serving.interface import KernelSettings
from kernel.serving.response import Response
from kernel.serving.route import ModelRoute
from kernel.serving.validation import validate
from kernel.settings import LogSettings, LogValues, TraceSettings
from shm.blocks import ByteBudget
from shm.lease import Lease
from shm.region import FileHandle, Region, RegionKind, check_sealed, read_only_fd
from shm.tensor import Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.memory.input_placement import MemoryRefusals, ReceiveBuffer
    from kernel.serving.prepared import PreparedRequest
    from kernel.serving.request import Request
    from shm.arena import Arena, Block

#: The least that a door asks for when its memory gets short, and the most.
_LEAST_BYTE_SIZE, _MOST_BYTE_SIZE = 16 << 20, 1 << 30

#: The errors that decide more than by their code: how often to send a request again, and which status it has.
_KINDS: dict[str, type[ServingError]] = {
    kind.__name__: kind
    for kind in (
        errors.QueueFull, errors.QuotaExceeded, errors.DeadlineTooNear, errors.NoMemory, errors.ArenaFull,
        errors.MemoryFull, errors.ServerStopping, errors.PoisonRequest,
    )
}  # fmt: skip


def received_error(message: messages.ErrorText) -> ServingError:
    """Return the error that the kernel has sent. Raises ValueError for a code that does not exist."""
    found = error_of(ErrorCode(message.code), message.text)
    if (kind := _KINDS.get(message.kind)) is not None:
        found = ServingError.__new__(kind)
        Exception.__init__(found, message.text)
        found.message = message.text
        if isinstance(found, errors.NoMemory):
            found.retry_later = message.retry_later
    found.before_queueing = message.before_queueing
    if message.max_byte_size:
        found.max_byte_size = message.max_byte_size
    return found


class DoorModel:
    """A model as a door has it: a name, and the arena for its inputs. Stands for `kernel.serving.model.Model`."""

    in_flight = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.input_arena: Arena | None = None
        #: Its number in messages, 0 before the kernel knows it.
        self.arena_number = 0


class DoorCatalog:
    """What the kernel has pushed of the catalog: the part of `kernel.serving.interface.CatalogView` for inference."""

    def __init__(self) -> None:
        #: Grows with every change.
        self.generation = 1
        #: By name and version as clients give them.
        self.routes: dict[tuple[str, str], ModelRoute] = {}
        #: All models that were ever known.
        self.models: dict[str, DoorModel] = {}

    def has_label(self, name: str, label: str) -> bool:
        """Requests that name a label are served by the kernel."""
        return False


class _ResponseLease(Lease):
    """A use of the outputs of one response. The last one lets the kernel release it."""

    __slots__ = ("_held", "_uses", "region", "region_number")

    def __init__(self, region: Region, uses: _ResponseUses) -> None:
        self.region = region
        self.region_number = region.number
        self._uses = uses
        self._held = True
        uses.count += 1

    def share(self) -> _ResponseLease:
        return _ResponseLease(self.region, self._uses)

    def release(self) -> None:
        if self._held:
            self._held = False
            uses = self._uses
            uses.count -= 1
            if not uses.count:
                uses.door.response_sent(uses.lease)


class _ResponseUses(msgspec.Struct, eq=False):
    door: DoorKernel
    lease: int
    count: int = 0


class _DoorBudget(ByteBudget):
    """The bytes that the kernel has granted. Asks for more when they get short."""

    __slots__ = ("_door",)

    def __init__(self, door: DoorKernel) -> None:
        super().__init__(1)
        self._door = door

    def has_room(self, byte_size: int) -> bool:
        self._door.note_use(byte_size)
        return super().has_room(byte_size)


class DoorKernel:
    """The server, for the protocol of a door."""

    takes_times = starting = start_failed = stopping = False

    def __init__(self, sock: socket.socket, helpers: Any, ended: Callable[[str | None], NoReturn]) -> None:
        """`helpers` is a `kernel.serving.helper_tasks.FrontDoorHelpers`.

        `ended` is called when the kernel is gone, with None, or with what is wrong with the connection to it.
        """
        self.catalog = DoorCatalog()
        self.helpers = helpers
        self.regions = RegionRegistry()
        self.budget: ByteBudget = _DoorBudget(self)
        self.settings = KernelSettings(TraceSettings(), LogSettings())
        self.log = self.settings.log
        self.cancel: Callable[..., None] = Cancellations(LoopClock()).add
        #: Set by `configure`.
        self.configuration: messages.Configure | None = None
        self.on_configured: Callable[[messages.Configure], None] = _ignore
        self.on_protocol: Callable[[messages.ProtocolOpened], None] = _ignore
        self.on_connection: Callable[[str, socket.socket, bytes, int], None] | None = None
        self.on_drain: Callable[[float], None] = _ignore
        self._inputs: InputPlacer
        self._channel = LoopChannel(sock, self._received, ended, MAX_KERNEL_FRAME)
        self._numbers = itertools.count(1)
        self._arena_numbers = itertools.count(1)
        #: Numbers of forms, by the address of the prepared request and the number of the headers.
        self._forms: dict[tuple[int, int], tuple[int, object]] = {}
        #: Numbers of headers, by the address of the head of a request, and by themselves.
        self._heads: dict[int, tuple[int, object]] = {}
        self._header_numbers: dict[tuple[tuple[bytes, bytes], ...], int] = {}
        self._last_form = self._forms_byte_size = 0
        self._open: dict[int, Request] = {}
        self._number_of: dict[Request, int] = {}
        #: Leases of blocks that the kernel may still use, by the number of the request.
        self._held: dict[int, list[Lease]] = {}
        self._arenas: dict[int, Region] = {}
        self._regions: dict[int, Region] = {}
        #: Responses that were sent, and what says so if no request does before.
        self._sent: list[int] = []
        self._later: asyncio.TimerHandle | None = None
        self._cancelled: list[int] = []
        #: What goes on when the kernel has said what a route is.
        self._waiting_for: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self._asks_for_memory = self._was_refused_memory = False
        self._granted = 0
        #: The most bytes in use since memory was given back last.
        self._most_used = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.Inferred: self._inferred,
            messages.InputsFree: self._inputs_free,
            messages.Connection: self._connection,
            messages.RoutesChanged: self._routes_changed,
            messages.RegionAdded: self._region_added,
            messages.RegionRemoved: self._region_removed,
            messages.Granted: self._memory_granted,
            messages.Configure: self._configure,
            messages.ProtocolOpened: lambda message: self.on_protocol(message),
            messages.LogVerbose: lambda message: self._set_verbose(message.level),
            messages.Drain: lambda message: self.on_drain(message.grace_s),
            messages.Ping: lambda message: self._channel.send(messages.Pong()),
        }

    def send(self, message: messages.FromDoor) -> None:
        """Send `message` at the end of this event-loop iteration."""
        self._channel.send(message)

    async def written(self) -> None:
        """Wait until all messages are sent."""
        await self._channel.written(0)

    @property
    def open_count(self) -> int:
        """How many requests have no final response."""
        return len(self._open)

    # ---- kernel.serving.interface.KernelInterface: requests ------------------------------------------

    def unary_route(self, name: str, version: str, entry_point: str) -> ModelRoute:
        """Return the route of a model that the kernel has pushed. Raises `ServedElsewhere`, and asks for it."""
        route = self.route(name, version)
        if route.spec.decoupled:
            raise ServedElsewhere(name)  # the kernel says what is wrong with the call
        return route

    def route(self, name: str, version: str = "") -> ModelRoute:
        """As `unary_route`, for a call that takes any number of responses."""
        route = self.catalog.routes.get((name, version))
        if route is None:
            self.send(messages.WantRoute(name, version))
            raise ServedElsewhere(name)
        return route

    def knows(self, name: str, version: str) -> bool:
        """Whether the kernel has pushed a route."""
        return (name, version) in self.catalog.routes

    def on_route_reply(self, name: str, version: str, go_on: Callable[[], None]) -> None:
        """Call `go_on` when the kernel has said what a route is, for which it was asked."""
        self._waiting_for.setdefault((name, version), []).append(go_on)

    def submit(
        self, request: Request, prepared: PreparedRequest | None = None, received_in: ReceiveBuffer | None = None,
        route: ModelRoute | None = None, *, admitted: bool = False,
    ) -> None:  # fmt: skip
        """Send `request` to the kernel, which checks and queues it. See `Kernel.submit`."""
        number = next(self._numbers)
        try:
            way = prepared.route if prepared is not None else route or self._route_of(request)
            if prepared is None or not prepared.small:
                self.note_use(0 if received_in is not None else sum(len(each.data or b"") for each in request.inputs))
                self._inputs.place_large(request, way.model, received_in)
            self._open[number] = request
            self._number_of[request] = number
            self._send_request(number, request, prepared, way)
        except Exception as error:
            self._open.pop(number, None)
            self._number_of.pop(request, None)
            for lease in self._held.pop(number, ()):
                lease.release()
            if not isinstance(error, ServingError):
                error = unexpected_error(f"the submission of a request to model '{request.model_name}'", error)
            request.refuse(error)
            return
        request.owner = self  # gets `cancelled`

    def _route_of(self, request: Request) -> ModelRoute:
        if request.streaming:
            return self.route(request.model_name, request.model_version)
        return self.unary_route(request.model_name, request.model_version, request.entry_point)

    def _send_request(self, number: int, request: Request, prepared: PreparedRequest | None, way: ModelRoute) -> None:
        data: list[bytes | messages.Place | None] = []
        for tensor in request.inputs:
            if tensor.data is not None:
                data.append(tensor.data)  # type: ignore[arg-type]  # msgspec encodes all buffers
            elif tensor.span is not None:
                data.append(self._placed(number, tensor.span, way.model))
            else:
                data.append(None)
        assert self.configuration is not None, "a request before the configuration"
        peer = ""
        if self.configuration.owned_regions and _uses_regions(request):
            peer = request.sink.peer
        if prepared is None or peer or request.parameters != prepared.request.parameters:
            self.send(
                messages.InferOnce(number, messages.form_of(request), data, request.id, peer, request.deadline_ns)
            )
        else:
            form = self._form_number(request, prepared)
            self.send(messages.Infer(number, form, data, request.id, request.deadline_ns))
        if self._sent:
            self._send_sent()  # it wakes the kernel no second time

    def _form_number(self, request: Request, prepared: PreparedRequest) -> int:
        """Return the number by which the kernel knows what requests made from `prepared` have in common."""
        head = messages.head_of(request.sink)
        heads = self._heads.get(id(head))
        if heads is None:
            if len(self._heads) >= messages.MOST_FORMS:  # also where they have no new forms
                self._forget_forms()
            # Heads that differ in the length of the body have forms in common. The head is kept, so that no other one
            # gets its address.
            headers = messages.headers_of(head)
            heads = self._heads[id(head)] = self._header_numbers.setdefault(headers, len(self._header_numbers)), head
        known = self._forms.get((id(prepared), heads[0]))
        if known is not None:
            return known[0]
        form = messages.form_of(request)
        byte_size = messages.form_byte_size(form)
        full = self._forms_byte_size + byte_size > messages.MOST_FORMS_BYTE_SIZE
        if self._forms and (full or len(self._forms) >= messages.MOST_FORMS):
            self._forget_forms()
            return self._form_number(request, prepared)
        self._last_form = number = self._last_form + 1
        self._forms[id(prepared), heads[0]] = number, prepared  # kept, as above
        self._forms_byte_size += byte_size
        self.send(messages.FormAdded(number, form))
        return number

    def _forget_forms(self) -> None:
        for each in (self._forms, self._heads, self._header_numbers):
            each.clear()
        self._forms_byte_size = 0
        self.send(messages.FormsForgotten())

    def _placed(self, number: int, span: Span, model: Any) -> messages.Place:
        """Return where an input is; its block is kept until the kernel says `InputsFree`."""
        region = span.lease.region
        if not model.arena_number or self._arenas[model.arena_number] is not region:
            arena = next(self._arena_numbers)
            fd = read_only_fd(region.fd)
            try:
                self._channel.send_with_fd(messages.ArenaAdded(arena, model.name, region.byte_size), fd)
            finally:
                os.close(fd)
            self._arenas[arena] = region
            region.on_closed(functools.partial(self._arena_closed, arena))
            model.arena_number = arena  # not before: without a descriptor the kernel does not know it
        self._held.setdefault(number, []).append(span.lease.share())
        return messages.Place(model.arena_number, span.offset, span.byte_size)

    def _arena_closed(self, number: int, region: Region) -> None:
        """No response is in this arena any more."""
        self._arenas.pop(number, None)

    def begin_preparing(self, request: Request, byte_size: int) -> None:
        """Count a request that is submitted later. Raises `MemoryFull`."""
        if not self.budget.has_room(byte_size):
            raise self.memory_refusals.full()
        self.budget.add(byte_size)

    def end_preparing(self, byte_size: int) -> None:
        self.budget.remove(byte_size)

    def check_shapes(self, request: Request, route: ModelRoute) -> None:
        validate(request, route.spec)

    # ---- kernel.serving.request.RequestOwner -----------------------------------------------------

    def responded(self, request: Request, response: Response) -> None:
        """Nothing is counted here."""

    def consumed(self, request: Request, count: int) -> None:
        number = self._number_of.get(request)
        if number is not None:
            self.send(messages.ResponsesTaken(number, count))

    def cancelled(self, request: Request) -> None:
        number = self._number_of.get(request)
        if number is not None:
            if not self._cancelled:
                IterationEnd.current().add_decision(self._send_cancelled)
            self._cancelled.append(number)

    def _send_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        self.send(messages.CancelInfer(cancelled))

    # ---- memory ----------------------------------------------------------------------------------

    @property
    def memory_refusals(self) -> MemoryRefusals:
        return self._inputs.refusals

    def receive_buffer(self, route: ModelRoute, byte_size: int, first_tensor: int) -> ReceiveBuffer | None:
        self.note_use(byte_size)
        return self._inputs.receive_buffer(route.model, byte_size, first_tensor)

    def message_buffer(self, byte_size: int) -> ReceiveBuffer:
        return self._inputs.message_buffer(byte_size)

    def memory_for(self, route: ModelRoute, byte_size: int) -> Block:
        return self._inputs.take(route.model, byte_size)

    def memory_for_helper(self, byte_size: int) -> Block:
        return self._inputs.take_for_helper(byte_size)

    def has_room_for(self, route: ModelRoute, byte_size: int) -> bool:
        """Whether there is room for a message of `byte_size` bytes. Asks for more memory when it gets short."""
        assert self.configuration is not None, "a request before the configuration"
        arena = route.model.input_arena
        wanted = self.note_use(byte_size)
        in_arena = (0 if arena is None else arena.allocator.used_bytes) + byte_size + ALIGNMENT
        # As `InputPlacer.receive_buffer`: half is for tensors that are copied.
        return 2 * wanted <= self.budget.limit_byte_size and 2 * in_arena <= self.configuration.arena_byte_size

    def note_use(self, byte_size: int) -> int:
        """Note that `byte_size` more bytes are about to be used, and ask for more memory when it gets short.

        Returns how many are in use then.
        """
        budget = self.budget
        wanted = budget.used_byte_size + byte_size + ALIGNMENT
        self._most_used = max(self._most_used, wanted)
        if 2 * wanted > budget.limit_byte_size // 2 and not self._asks_for_memory:
            self._asks_for_memory = True
            more = min(max(_LEAST_BYTE_SIZE, budget.limit_byte_size), _MOST_BYTE_SIZE)
            self.send(messages.WantMemory(max(more, 4 * byte_size)))
        return wanted

    def _memory_granted(self, message: messages.Granted) -> None:
        # Where the server has none, the door asks again a moment later, and not for each message.
        self._asks_for_memory = self._was_refused_memory = not message.byte_size
        self._granted += message.byte_size
        self.budget.limit_byte_size = max(1, self._granted)

    def return_memory(self) -> None:
        """Give memory back to the kernel that was not used for some time. Called now and then."""
        if self._was_refused_memory:
            self._asks_for_memory = self._was_refused_memory = False
        most_used, self._most_used = self._most_used, self.budget.used_byte_size
        unused = self._granted - max(_LEAST_BYTE_SIZE, 4 * most_used)
        if unused > self._granted // 2 and not self._asks_for_memory:
            self._granted -= unused
            self.budget.limit_byte_size = max(1, self._granted)
            self.send(messages.MemoryReturned(unused))

    # ---- messages of the kernel ------------------------------------------------------------------

    def _received(self, received: list[bytes]) -> None:
        handlers, decode = self._handlers, messages.to_door_decoder.decode
        for octets in received:
            message = decode(octets)
            handlers[type(message)](message)

    def _configure(self, message: messages.Configure) -> None:
        self.configuration = message
        self._granted = message.granted_byte_size
        self.budget.limit_byte_size = max(1, self._granted)
        self.regions.owned = message.owned_regions
        self._inputs = InputPlacer(self.regions, message.arena_byte_size, self.budget, in_next_iteration)
        self.log = LogSettings(LogValues(log_verbose_level=message.log_verbose_level))
        self.settings = KernelSettings(
            TraceSettings(), self.log, max_decompression_ratio=message.max_decompression_ratio
        )
        self.on_configured(message)

    def _set_verbose(self, level: int) -> None:
        self.log.update({"log_verbose_level": level})

    def _connection(self, message: messages.Connection) -> None:
        sock = socket.socket(fileno=self._channel.take_fd())
        if self.on_connection is None:
            sock.close()
        else:
            self.on_connection(message.protocol, sock, message.received, message.passes)

    def give_back(self, transport: asyncio.Transport, received: bytes, passes: int) -> bool:
        """Let the kernel serve a connection from now on, as `backends.doors.pool.DoorPool.give`."""
        sock = transport.get_extra_info("socket")
        if sock is None:
            return False
        try:
            self._channel.send_with_fd(messages.Moved(received, passes), sock.fileno())
        except OSError:
            return False
        transport.abort()
        return True

    def open_calls(self, address: object, identity: str) -> socket.socket:
        """Return a connection over which the kernel takes calls of one client, as HTTP/2. Raises `OSError`.

        `address` is the client's as its transport gives it, `identity` is who it is.
        """
        ours, theirs = socket.socketpair()
        try:
            parts = list(address) if isinstance(address, tuple) else []
            self._channel.send_with_fd(messages.CallsOpened(parts, identity), theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def _routes_changed(self, message: messages.RoutesChanged) -> None:
        catalog = self.catalog
        changed = False
        for each in message.routes:
            if each.spec:
                spec = msgspec.msgpack.decode(each.spec, type=ModelSpec)
                model = catalog.models.setdefault(each.name, DoorModel(each.name))
                route = ModelRoute(spec, model)  # type: ignore[arg-type]  # what front doors use of it is there
                catalog.routes[each.name, each.version] = route
                changed = True
            elif catalog.routes.pop((each.name, each.version), None) is not None:
                changed = True
        if changed:
            catalog.generation += 1
            self._forget_forms()
        for each in message.routes:
            for go_on in self._waiting_for.pop((each.name, each.version), ()):
                go_on()

    def close_unused_arenas(self) -> None:
        """Give up the arenas of models that the kernel has unloaded. Called now and then."""
        served = {name for name, _ in self.catalog.routes}
        for model in self.catalog.models.values():
            arena = model.input_arena
            if arena is None or model.name in served or arena.allocator.block_count:
                continue
            if model.arena_number:
                self.send(messages.ArenaRemoved(model.arena_number))
            model.input_arena, model.arena_number = None, 0
            arena.close()

    def _region_added(self, message: messages.RegionAdded) -> None:
        fd = self._channel.take_fd()
        try:
            check_sealed(fd, message.byte_size)
        except BaseException:
            os.close(fd)
            raise
        self._regions[message.number] = Region("outputs", RegionKind.ARENA, FileHandle(fd), message.byte_size)

    def _region_removed(self, message: messages.RegionRemoved) -> None:
        self._regions.pop(message.number).drop()

    def _inputs_free(self, message: messages.InputsFree) -> None:
        for number in message.requests:
            for lease in self._held.pop(number):
                lease.release()

    def _inferred(self, message: messages.Inferred) -> None:
        request = self._open[message.request]
        if message.final:
            del self._open[message.request]
            del self._number_of[request]
        if message.at_once and request.streaming:
            request.sink.refused_at_once()  # type: ignore[attr-defined]  # a `StreamRequest`
        response = Response(
            message.model_name or request.model_name, message.model_version, request.id, message.outputs,
            message.parameters, final=message.final, refused=message.refused,
        )  # fmt: skip
        if message.error is not None:
            response.error = received_error(message.error)
        elif message.lease:
            response.leased = True
            uses = _ResponseUses(self, message.lease)
            for tensor in message.outputs or ():
                if (span := tensor.span) is not None:
                    number = span.lease.region_number
                    region = self._regions[number] if number > 0 else self._arenas[-number]
                    tensor.span = Span(_ResponseLease(region, uses), span.offset, span.byte_size)
        request.respond(response)

    def response_sent(self, lease: int) -> None:
        """The outputs of a response are no longer used."""
        if not self._sent:
            self._later = asyncio.get_running_loop().call_later(messages.RELEASE_S, self._send_sent)
        self._sent.append(lease)

    def _send_sent(self) -> None:
        sent, self._sent = self._sent, []
        if self._later is not None:
            self._later.cancel()
        if sent:
            self.send(messages.ResponsesSent(sent))


def _ignore(_: object) -> None:
    """What a door does before its protocol is there."""


def _uses_regions(request: Request) -> bool:
    return any(each.client_span is not None for each in request.inputs) or any(
        each.client_span is not None for each in request.outputs
    )
