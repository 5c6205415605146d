"""The calls that a simulated worker's model makes while it executes a batch: one stage after another, each with calls
of several models at the same time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from backends.transport import wire
from shm.lease import RegionNumber
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.plan import ModelPlan
    from tests.simulation.workers import SimulatedWorker
    from tests.simulation.world import World

#: A call that is made for a call, and so on, makes no more calls from here on: circles of models would never end.
MOST_DEPTH = 3

#: One of this number of calls is cancelled by the model, after this time.
_CANCELLED = 16
_CANCELLED_AFTER_NS = 100_000

#: What a call may fail with before it is queued, beside its model being away.
_REFUSALS = ("Server exiting", "no instance of model", "no memory", "memory", "Exceeds maximum queue size")


class ExecutingBatch:
    """A batch whose model makes calls."""

    def __init__(self, message: wire.Execute, ended: Callable[[], None]) -> None:
        self.message = message
        self.ended = ended
        self.next_stage = 0
        #: Calls without a final response, by number: the model that is called.
        self.open: dict[int, str] = {}


class SimulatedCalls:
    """The calls of one worker."""

    def __init__(self, world: World, worker: SimulatedWorker, plan: ModelPlan) -> None:
        self._world = world
        self._worker = worker
        self._plan = plan
        #: The names of the models that each request of a batch calls at the same time.
        self._stages = plan.calls
        self._last_call = 0
        self._batch_of: dict[int, ExecutingBatch] = {}
        #: Results that are kept until the batch has ended.
        self._kept: dict[int, list[int]] = {}

    @property
    def waits(self) -> bool:
        """Whether the model waits for a call."""
        return bool(self._batch_of)

    def begin(self, message: wire.Execute, ended: Callable[[], None]) -> None:
        """Make all calls of a batch. `ended` is called once all have their final response."""
        if message.batch <= self._plan.batches_without_calls:
            ended()
            return
        self._go_on(ExecutingBatch(message, ended))

    def _go_on(self, batch: ExecutingBatch) -> None:
        while not batch.open and batch.next_stage < len(self._stages):
            names = self._stages[batch.next_stage]
            batch.next_stage += 1
            numbers: list[tuple[int, str, wire.RequestMessage]] = []
            for entry in batch.message.requests:
                if entry.id.count("/") < MOST_DEPTH:
                    for name in names:
                        self._last_call += 1
                        batch.open[self._last_call] = name
                        self._batch_of[self._last_call] = batch
                        numbers.append((self._last_call, name, entry))
            for number, name, entry in numbers:  # a refusal comes back at once
                self._submit(number, name, entry, batch)
        if not batch.open:
            if leases := self._kept.pop(batch.message.batch, None):
                self._worker.say(wire.Released(leases))
            batch.ended()

    def _submit(self, number: int, name: str, entry: wire.RequestMessage, batch: ExecutingBatch) -> None:
        target = next(each for each in self._world.scenario.models if each.spec.name == name)
        alone = self._worker.concurrency == 1
        self._worker.say(
            wire.Submit(
                number,
                name,
                "",
                wire.RequestMessage(0, [_input(entry)], id=f"{entry.id}/{number}"),
                [each.number for each in batch.message.requests],
                blocking=alone,
                streaming=target.spec.decoupled,
            )
        )
        if number % _CANCELLED == 0 and number in self._batch_of:
            cancel = partial(self._cancel, number)
            self._world.after(_CANCELLED_AFTER_NS, self._worker.when_running(cancel))

    def _cancel(self, number: int) -> None:
        if number in self._batch_of:
            self._world.tell("%s cancels its call %s", self._worker.title, number)
            self._worker.say(wire.CancelCall(number))

    def responded(self, message: wire.CallResponded) -> None:
        """Take a response. The model handles it later, like a process that is woken."""
        batch = self._batch_of.get(message.call)
        self._world.check(batch is not None, "%s gets a response to call %s, which has ended or was never made",
                          self._worker.title, message.call)  # fmt: skip
        assert batch is not None
        if message.final:
            del self._batch_of[message.call]
            self._check_error(batch.open[message.call], message.response)
        self._world.after(0, self._worker.when_running(partial(self._take, message, batch)))

    def _take(self, message: wire.CallResponded, batch: ExecutingBatch) -> None:
        response = message.response
        if response is not None and message.lease:
            placed = [each for each in response.outputs if each.span is not None]
            for each in placed:
                assert each.span is not None
                number = each.span.lease.region_number
                known = number in self._worker.attached
                self._world.check(known, "%s does not know region %s of a result", self._worker.title, number)
            leases = list(range(message.lease, message.lease + len(placed)))
            if message.call % 2:
                self._worker.say(wire.Released(leases))
            else:
                self._kept.setdefault(batch.message.batch, []).extend(leases)
        if message.final:
            del batch.open[message.call]
            if not batch.open:
                self._go_on(batch)
        else:
            self._worker.say(wire.CallConsumed(message.call, 1))

    def _check_error(self, name: str, response: wire.ResponseMessage | None) -> None:
        """Check that a call was refused, or failed as stuck, for a reason."""
        if response is None or not response.error_code:
            return
        world, text = self._world, response.error_text
        index = next(n for n, plan in enumerate(world.scenario.models) if plan.spec.name == name)
        if text.endswith("is not ready."):
            world.check(world.serving[index] is None, "a call of %s is refused, and it serves: %s", name, text)
        elif "every instance that could execute the request waits" in text:
            world.check(self._in_circle(name), "a call of %s fails as stuck, and nothing calls in a circle", name)
        elif "Error when running inference" in text:
            known = any(each in text for each in _REFUSALS) or world.serving[index] is None
            world.check(known, "a call of %s is refused without a reason: %s", name, text)

    def _in_circle(self, name: str) -> bool:
        """Whether a model calls itself through others, or a model that does."""
        models = self._world.scenario.models
        called = {plan.spec.name: {each for stage in plan.calls for each in stage} for plan in models}
        return any(each in _reached(called, each) for each in {name, *_reached(called, name)})


def _reached(called: dict[str, set[str]], name: str) -> set[str]:
    """Return the models that a model calls, directly or through others."""
    reached: set[str] = set()
    todo = [name]
    while todo:
        for each in called[todo.pop()] - reached:
            reached.add(each)
            todo.append(each)
    return reached


def _input(entry: wire.RequestMessage) -> Tensor:
    """Return the input of the caller as that of its call; large ones stay where they are."""
    given = entry.inputs[0]
    if given.span is None:
        return Tensor("IN", "FP32", list(given.shape), given.data)
    span = Span(RegionNumber(given.span.lease.region_number), given.span.offset, given.span.byte_size)
    return Tensor("IN", "FP32", list(given.shape), span=span)
