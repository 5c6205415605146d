"""Which executions wait for which calls between models, and which calls can never be executed. Pure.

A model that calls another model and waits for the response keeps its instance. If every instance that could execute a
call waits, directly or through other calls, for this call, then nothing continues. Such a call is *stuck*; it is found
here, so that it can be failed. A request continues

- if it is queued: when an instance of its model is free, or can become free, and the rate limiter lets it start;
- if an instance executes it: when all calls that its batch waits for continue; a batch that waits for no call does;
- if it is a request to an ensemble: when all requests of its steps continue.

All other requests are stuck. Calls never wait for the order of responses (`preserve_ordering`), because they have no
place in it (`schedulers/response_order.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.serving.model import Model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.serving.instance import BatchRecord, Instance
    from kernel.serving.request import Request

#: A call of which it is not known whether its caller's execution waits for it counts as waited for after this time, in
#: nanoseconds. A thread of the model has made it, and the execution may end without its response.
DOUBT_NS = 500_000_000

#: Sets of requests that must all continue, of which one set is enough. An empty set continues by itself.
_Alternatives = list[list["Request"]]

_GOES_ON: _Alternatives = [[]]


class Execution(msgspec.Struct, frozen=True):
    """The batch of an instance from which a call was made."""

    instance: Instance
    batch: int
    #: Whether the batch cannot be finished without the response.
    blocking: bool


class _Waiting(msgspec.Struct):
    execution: Execution
    since_ns: int


class LiveModels(Protocol):
    """Implemented by `kernel.serving.catalog.Catalog`."""

    def executing_models(self) -> Iterable[Model]:
        """Return all versions that may have requests."""


class CallWaits:
    """The calls that have no final response and were made from a batch that an instance executes."""

    def __init__(self, models: LiveModels) -> None:
        self._models = models
        self._waiting: dict[Request, _Waiting] = {}
        #: By instance, the calls that its batches have made.
        self._calls_of: dict[Instance, dict[Request, _Waiting]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, call: Request, execution: Execution, now_ns: int) -> None:
        """`call` was made. `remove` follows when it has its final response, or its caller is lost."""
        waiting = self._waiting[call] = _Waiting(execution, now_ns)
        self._calls_of.setdefault(execution.instance, {})[call] = waiting

    def remove(self, call: Request) -> None:
        """`call` has ended. A second call does nothing."""
        waiting = self._waiting.pop(call, None)
        if waiting is not None:
            instance = waiting.execution.instance
            calls = self._calls_of[instance]
            del calls[call]
            if not calls:
                del self._calls_of[instance]

    def youngest_stuck(self, call: Request, now_ns: int) -> Request | None:
        """Return None if `call` is not stuck, else the youngest call of those that it waits for, or itself."""
        graph: dict[Request, _Alternatives] = {}
        if self._collect(call, graph, now_ns):  # usual
            return None
        stuck = _not_going_on(graph)
        if call not in stuck:
            return None
        return next((each for each in reversed(self._waiting) if each in stuck), call)

    def waiting(self) -> list[Request]:
        """Return the calls, the oldest first."""
        return list(self._waiting)

    def check(self) -> None:
        """Recompute the invariants."""
        counted = [call for calls in self._calls_of.values() for call in calls]
        assert sorted(map(id, counted)) == sorted(map(id, self._waiting)), "calls are recorded twice or not at all"
        for call in self._waiting:
            assert not call.finished, f"call {call.id!r} to '{call.model_name}' waits after its final response"

    # ---- what a request waits for ------------------------------------------------------------

    def _collect(self, start: Request, graph: dict[Request, _Alternatives], now_ns: int) -> bool:
        """Add `start` and all requests that it waits for to `graph`. Returns whether `start` continues by itself."""
        todo = [start]
        while todo:
            request = todo.pop()
            if request in graph:
                continue
            alternatives = graph[request] = self._alternatives(request, now_ns)
            if [] not in alternatives:  # what continues by itself waits for nothing
                todo += [each for alternative in alternatives for each in alternative]
        return [] in graph[start]

    def _alternatives(self, request: Request, now_ns: int) -> _Alternatives:
        model = request.owner
        if request.finished or not isinstance(model, Model) or request not in model.live.instance_of:
            return _GOES_ON
        instance = model.live.instance_of[request]
        if model.spec.ensemble is not None:
            return [list(request.steps)]
        if instance is None:
            return self._of_queued(request, model, now_ns)
        for batch in _executing(instance.record):
            if request in instance.record.batches[batch].requests:
                return [self._calls_from(instance, batch, now_ns)]
        return self._of_instances([instance], now_ns)  # it was dispatched ahead of time

    def _of_queued(self, request: Request, model: Model, now_ns: int) -> _Alternatives:
        sequence = request.sequence
        if sequence is not None and sequence.instance is not None:
            return self._of_instances([sequence.instance], now_ns)
        instances = list(model.instances.serving)
        if not instances or any(condition.lost for condition in model.instances.conditions):
            return _GOES_ON  # one is started again, or all requests fail
        alternatives = self._of_instances(instances, now_ns)
        if [] in alternatives and model.instances.admission is not None and model.instances.idle_instance() is None:
            return self._of_resources(now_ns)
        return alternatives

    def _of_resources(self, now_ns: int) -> _Alternatives:
        """Return what must continue so that the rate limiter lets another batch start: any batch that it let start."""
        found: _Alternatives = []
        for model in self._models.executing_models():
            for instance in model.instances.everywhere if model.instances.admission is not None else ():
                found += [self._calls_from(instance, batch, now_ns) for batch in _executing(instance.record)]
        return found or _GOES_ON

    def _of_instances(self, instances: Sequence[Instance], now_ns: int) -> _Alternatives:
        """Return what must continue so that one of the instances is free for another batch."""
        found: _Alternatives = []
        for instance in instances:
            executing = _executing(instance.record)
            if instance not in self._calls_of or len(executing) < instance.record.concurrency:
                return _GOES_ON
            for batch in executing:
                calls = self._calls_from(instance, batch, now_ns)
                if not calls:
                    return _GOES_ON
                found.append(calls)
        return found

    def _calls_from(self, instance: Instance, batch: int, now_ns: int) -> list[Request]:
        return [
            call
            for call, waiting in self._calls_of.get(instance, {}).items()
            if waiting.execution.batch == batch
            and (waiting.execution.blocking or now_ns - waiting.since_ns >= DOUBT_NS)
        ]


def _executing(record: BatchRecord) -> list[int]:
    """Return the numbers of the batches that an instance has started."""
    unstarted = {batch.number for batch in record.unstarted()}
    return [number for number in record.batches if number not in unstarted]


def _not_going_on(graph: dict[Request, _Alternatives]) -> set[Request]:
    """Return the requests that do not continue."""
    stuck = dict.fromkeys(graph)
    waiting_for: dict[Request, list[Request]] = {}
    for request, alternatives in graph.items():
        for alternative in alternatives:
            for each in alternative:
                waiting_for.setdefault(each, []).append(request)
    todo = [request for request, alternatives in graph.items() if [] in alternatives]
    while todo:
        request = todo.pop()
        if request not in stuck:
            continue
        if any(all(each not in stuck for each in alternative) for alternative in graph[request]):
            del stuck[request]
            todo += waiting_for.get(request, ())
    return set(stuck)
