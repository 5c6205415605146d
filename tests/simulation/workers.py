"""Workers of the simulation: they execute batches in simulated time and speak the real protocol with a real handle."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from backends.supervision.handle import WorkerHandle
from backends.transport import wire
from backends.transport.outbox import Progress
from shm.lease import RegionNumber
from shm.tensor import Span, Tensor
from tests.simulation.calls import SimulatedCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.serving.batch import Batch
    from tests.simulation.clients import Client
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.world import World

#: A worker reports a start, and gets the model's attention, this long after it could.
_BEGIN_NS = 1_000


class SimulatedHandle(WorkerHandle):
    """The real handle, which also shows each batch to the checks."""

    version: SimulatedVersion
    most_at_once = 2

    def execute(self, batch: Batch) -> None:
        self.version.checks.dispatched(self, batch)
        super().execute(batch)


class SimulatedWorker:
    """A worker process with its session: `WorkerSession`'s part that a handle uses."""

    local = True
    arena_byte_size = 1 << 20
    clock_offset_ns = 0
    pid = 0
    unreachable = False

    def __init__(self, world: World, version: SimulatedVersion, title: str) -> None:
        self._world = world
        self._version = version
        self.title = title
        self.concurrency = version.plan.concurrency
        self.checks_health = False
        self.overlaps = False
        self._handlers: wire.Handlers = {}
        self._pieces: Iterator[None] | None = None
        self._kept: deque[wire.ToKernel] = deque()
        self.on_lost: Callable[[str], None] | None = None
        self.send = self.receive
        self.alive = True
        self.paused = False
        #: Batches that were not begun.
        self.waiting: deque[wire.Execute] = deque()
        #: Batches that were begun, by number.
        self.executing: dict[int, wire.Execute] = {}
        #: What the process finishes when it goes on.
        self._held_back: list[Callable[[], None]] = []
        self._begun = 0
        self._in_model = False
        #: Regions that the kernel has announced.
        self.attached: set[int] = set()
        self.cancelled: set[int] = set()
        #: By slot: which sequence the model has there.
        self.sequences: dict[int, int | str] = {}
        #: The calls of the model.
        self.calls = SimulatedCalls(world, self, version.plan)
        #: How often each request was executed.
        self.executions: dict[str, int] = {}
        self.handle: SimulatedHandle

    # ---- the session, as the handle uses it --------------------------------------------------

    def take_messages(self, handlers: wire.Handlers) -> None:
        self._handlers = handlers

    def watch_outbox(self) -> None:
        """Do nothing: a simulated worker sends each response at once."""

    def handle_in_pieces(self, pieces: Iterator[None]) -> None:
        """Handle a message in pieces, between which others have their turn."""
        next(pieces)
        self._pieces = pieces
        self._world.after(0, self._handle_piece)

    def _handle_piece(self) -> None:
        if self._pieces is None:
            return
        if not next(self._pieces, True):
            self._world.after(0, self._handle_piece)
            return
        self._pieces = None
        kept, self._kept = self._kept, deque()
        for message in kept:
            self.say(message)

    def say(self, message: wire.ToKernel) -> None:
        """Send a message, which the handle gets at once, unless it still handles an earlier one."""
        if self._pieces is not None:
            self._kept.append(message)
        else:
            self._handlers[type(message)](message)

    def flush(self) -> None:
        """Do nothing: the worker has each message when it is sent."""

    def send_with_fd(self, message: wire.ToWorker, fd: int) -> None:
        self.receive(message)

    def take_unsent(self) -> None:
        """Do nothing: simulated responses are sent at once."""

    def progress(self) -> Progress:
        return Progress(self._begun, self._in_model)

    # ---- messages from the kernel ------------------------------------------------------------

    def receive(self, message: wire.ToWorker) -> None:
        """Take a message; nothing is sent back before a later event."""
        if not self.alive:
            return
        match message:
            case wire.Execute():
                self._version.checks.received(self, message)
                self.waiting.append(message)
                self._begin_soon()
            case wire.Cancel(requests=numbers):
                self.cancelled.update(numbers)
            case wire.Attach(number=number):
                self.attached.add(number)
            case wire.Detach(number=number):
                self.attached.discard(number)
            case wire.CallResponded() if self._version.plan.calls:
                self.calls.responded(message)
            case wire.Recall() if self._version.plan.calls:
                self._world.after(0, self.when_running(self._give_back_waiting))
            case _:
                self._version.checks.message(self, message)

    # ---- executing ---------------------------------------------------------------------------

    def _begin_soon(self) -> None:
        self._world.after(0, self.when_running(self._begin))

    def when_running(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return `step` for a process that may be paused or gone when its time comes."""

        def run() -> None:
            if not self.alive:
                return
            if self.paused:
                self._held_back.append(step)
            else:
                step()

        return run

    def _begin(self) -> None:
        while self.waiting and len(self.executing) < self.concurrency:
            message = self.waiting.popleft()
            self.executing[message.batch] = message
            self._begun, self._in_model = message.batch, False
            duration_ns = self._version.execution_ns()
            reach, finish = partial(self._reach_model, message.batch), partial(self._finish, message, duration_ns)
            if self._version.plan.calls:
                finish = partial(self.calls.begin, message, finish)
            self._world.after(min(_BEGIN_NS, duration_ns), self.when_running(reach))
            self._world.after(duration_ns, self.when_running(finish))

    def _give_back_waiting(self) -> None:
        """Return what was dispatched ahead of time: the model calls another one."""
        batches, self.waiting = self.waiting, deque()
        self._version.returns(self.handle, [message.batch for message in batches])
        self.say(wire.Recalled([message.batch for message in batches]))

    def _reach_model(self, number: int) -> None:
        if number == self._begun:
            self._in_model = True
        if self.concurrency > 1 and number in self.executing:
            self.say(wire.Started(number))

    def _finish(self, message: wire.Execute, duration_ns: int) -> None:
        del self.executing[message.batch]
        self._version.checks.executed(self, message)
        end_ns = self._world.clock.now_ns()
        start_ns = end_ns - duration_ns
        entries = [each for each in message.requests if each.sequence is None or not each.sequence.empty]
        responses: list[wire.ResponseMessage] = []
        entries = [each for each in entries if not self._gives_back(each)]
        if self._version.plan.spec.decoupled:
            for each in entries:
                self._stream(each)
        else:
            responses = [self._response(each, final=True) for each in entries]
        done = wire.Executed(message.batch, responses, start_ns, start_ns, end_ns, end_ns)
        self.say(done)
        self._begin()

    def _gives_back(self, entry: wire.RequestMessage) -> bool:
        """Whether the model wants to execute the request once more (iterative sequences). Then it goes back."""
        batching = self._version.plan.spec.sequence_batching
        if batching is None or not batching.iterative:
            return False
        done = self.executions[entry.id] = self.executions.get(entry.id, 0) + 1
        again = done < self.client_of(entry).plan.executions
        if again:
            self.say(wire.Rescheduled(entry.number))
        return again

    def _stream(self, entry: wire.RequestMessage) -> None:
        """Send all responses of a request to a decoupled model."""
        client = self.client_of(entry)
        count = client.plan.responses
        if entry.number in self.cancelled:
            count = min(count, 1)
        last = client.plan.final_with_last
        for number in range(count):
            final = last and number == count - 1
            self.say(wire.Responded(entry.number, final, self._response(entry, final=final)))
        if not last or not count:
            self.say(wire.Responded(entry.number, True))

    def client_of(self, entry: wire.RequestMessage) -> Client:
        """Return the client of a request, by its id."""
        return self._world.clients[int(entry.id.partition("/")[0])]

    def _response(self, entry: wire.RequestMessage, *, final: bool) -> wire.ResponseMessage:
        if self._version.fails():
            return wire.ResponseMessage(error_code="internal", error_text="the model failed on purpose")
        return wire.ResponseMessage(self.outputs(entry, final=final))

    def outputs(self, entry: wire.RequestMessage, *, final: bool) -> list[Tensor]:
        """Return the one output: the input, in place if it is large."""
        given = entry.inputs[0]
        shape, span = list(given.shape), given.span
        if span is not None and final:
            assert span.lease.region_number in self.attached, "the worker was not told of the region of an input"
            place = Span(RegionNumber(span.lease.region_number), span.offset, span.byte_size)
            return [Tensor("OUT", "FP32", shape, span=place)]
        return [Tensor("OUT", "FP32", shape, given.data or bytes(given.byte_size))]

    # ---- faults ------------------------------------------------------------------------------

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def go_on(self) -> None:
        """SIGCONT: what was finished meanwhile is sent now."""
        self.paused = False
        held, self._held_back = self._held_back, []
        for step in held:
            self.when_running(step)()

    def die(self) -> None:
        """The process is gone, and sends nothing any more; what it has sent is handled at once."""
        while self._pieces is not None:
            self._handle_piece()
        self.alive = False
        self.waiting.clear()
        self.executing.clear()
