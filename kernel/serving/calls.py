"""Calls: requests that models send to other models, which executions wait for them, and loads by models.

A call goes through `Kernel.submit` like any other request. It has the caller's request as its parent: it is admitted
also while the server drains, and is charged to no quota again. Error texts are Triton's (`RequestExecutor::Infer` in
python_backend's request_executor.cc).

A model that calls another model and waits for the response keeps its instance. If every instance that could execute a
call waits, directly or through other calls, for this call, then nothing continues. Such a call is *stuck*; `CallWaits`
finds it, so that it can be failed. A request continues

- if it is queued: when an instance of its model is free, or can become free, and the rate limiter lets it start;
- if an instance executes it: when all calls that its batch waits for continue; a batch that waits for no call does;
- if it is a request to an ensemble: when all requests of its steps continue.

All other requests are stuck. Calls never wait for the order of responses (`preserve_ordering`), because they have no
place in it (`schedulers/dynamic.py`).

A model may also load other models while it is loaded itself, in `initialize`. A load waits for an earlier load of the
same model, so a model that loads itself, directly or through other models, would wait without end (`NestedLoads`).
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import InternalError, InvalidArgument, ServingError, Unavailable
from kernel.observe.limited_log import LimitedLog
from kernel.serving.model import Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.loop.clock import Alarm, Clock
    from kernel.serving.catalog import Catalog
    from kernel.serving.instance import BatchRecord, Instance
    from kernel.serving.request import Request

_failures = LimitedLog(logging.getLogger(__name__))

#: How often calls that wait are checked, in nanoseconds: some may have become stuck after they were made.
_LOOK_NS = 250_000_000

#: The most calls that are checked at a time. Each takes some microseconds.
_MOST_LOOKED_AT = 200


class CallTarget(Protocol):
    """Executes calls. Implemented by `kernel.serving.kernel.Kernel`."""

    def resolve(self, name: str, version: str = "", namespace: str = "") -> Model:
        """Return the version for a request, in the repository `namespace` first. Raises `ServingError`."""

    def resolve_for(
        self, request: Request, parent: Request, name: str, version: str = "", namespace: str = ""
    ) -> Model:
        """As `resolve`, for a request that is made for `parent`. Raises `ServingError`."""

    def submit(self, request: Request, *, pinned: Model | None = None) -> None:
        """Check and queue a request. A refusal is a response to its sink, perhaps before this method returns."""


class Calls:
    """The calls of all models. Fails those that can never be executed."""

    def __init__(self, target: CallTarget, catalog: Catalog, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        self.waits = CallWaits(catalog)
        #: Calls that were cancelled because they are stuck.
        self._stuck: set[Request] = set()
        #: Rings while calls wait; made when it is first needed.
        self._alarm: Alarm | None = None
        #: The calls that are checked next.
        self._to_look_at: deque[Request] = deque()

    def submit(self, call: Request, execution: Execution | None, *, streaming: bool, namespace: str = "") -> None:
        """Send `call` to its model. Without `streaming` it can have only one response.

        With --model-namespacing the model is looked for in the repository of the caller, `namespace`, first.

        `execution` is the batch from which it was made, if it was made from one. Raises `ServingError` with the text
        for the caller if there is no model for it; then no lease is kept, and the sink gets no response. Otherwise
        `ended` follows, possibly before this method returns.
        """
        try:
            model = self._model_of(call, namespace, streaming=streaming)
        except ServingError as error:
            call.release_leases()
            raise refused(call, error) from error
        # With a parent the call was admitted, and paid for, with it.
        self._target.submit(call, pinned=model if namespace or call.parent is not None else None)
        if call.finished or execution is None:
            return
        self.waits.add(call, execution, self._clock.now_ns())
        if execution.blocking:
            instance = _executing_at_once(call, model)
            if instance is None:
                self._look_at(call)
            else:  # the calling thread does nothing but wait for the response
                instance.send_now()
        if self._alarm is None:
            self._alarm = self._clock.alarm(self._look)
        if len(self.waits) == 1:
            self._alarm.set(self._clock.now_ns() + _LOOK_NS)

    def _model_of(self, call: Request, namespace: str, *, streaming: bool) -> Model:
        name, version = call.model_name, call.model_version
        if call.parent is None:
            model = self._target.resolve(name, version, namespace)
        else:
            model = self._target.resolve_for(call, call.parent, name, version, namespace)
        if model.spec.decoupled and not streaming:
            raise InternalError(
                f"Model {call.model_name} is using the decoupled. The current BLS request call doesn't support models "
                "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                "'async_exec' calls for decoupled models.'"
            )
        return model

    def find(self, name: str, version: str, namespace: str = "") -> Model | None:
        """Return the version for a call, in the repository `namespace` first; None if there is none."""
        try:
            return self._target.resolve(name, version, namespace)
        except ServingError:
            return None

    def requeued(self, call: Request) -> None:
        """`call` was dispatched and is queued again."""
        self._look_at(call)

    def ended(self, call: Request) -> None:
        """`call` has its final response, or its caller no longer waits for it."""
        self.waits.remove(call)
        self._stuck.discard(call)

    def error_of(self, call: Request, error: ServingError, *, was_refused: bool = False) -> ServingError:
        """Return the error that the caller gets for an error response to `call`; `Response.refused` says which."""
        if call in self._stuck:
            return refused(
                call,
                Unavailable(
                    "every instance that could execute the request waits, itself or through calls of other models, for "
                    "this request. A model that is called while it waits for a call needs another instance"
                ),
            )
        return refused(call, error) if was_refused or error.before_queueing else error

    # ---- calls that can never be executed ----------------------------------------------------

    def _look(self) -> None:
        if not self._to_look_at:
            self._to_look_at.extend(self.waits.waiting())
        for _ in range(min(len(self._to_look_at), _MOST_LOOKED_AT)):
            call = self._to_look_at.popleft()
            if not call.finished:
                self._look_at(call)
        if len(self.waits) and self._alarm is not None:
            self._alarm.set(self._clock.now_ns() + _LOOK_NS)

    def _look_at(self, call: Request) -> None:
        """Fail a call if `call` is stuck: then the others continue."""
        stuck = self.waits.youngest_stuck(call, self._clock.now_ns())
        if stuck is not None and stuck not in self._stuck:
            _failures.log(
                f"calls of model '{stuck.model_name}'",
                "a call of model '%s' fails: all instances that could execute it wait for this call", stuck.model_name,
            )  # fmt: skip
            self._stuck.add(stuck)
            stuck.cancel()

    def check(self) -> None:
        """Recompute the invariants; for tests."""
        self.waits.check()


def _executing_at_once(call: Request, model: Model) -> Instance | None:
    """Return the instance to which a submitted call was dispatched, if it has no other batch before it."""
    instance = model.live.instance_of.get(call)
    if instance is None or len(instance.record.batches) > instance.record.concurrency:
        return None
    return instance


def refused(call: Request, error: ServingError) -> ServingError:
    """Return the error of a call that its model has not queued. Triton gives all of them the code INTERNAL."""
    return InternalError(f"Model {call.model_name} - Error when running inference: {error.message}")


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


class CallWaits:
    """The calls that have no final response and were made from a batch that an instance executes."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
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
        for model in self._catalog.executing_models():
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


class NestedLoads:
    """Which models that are being loaded wait for the loads of which others."""

    def __init__(self) -> None:
        self._waits: list[tuple[str, str]] = []

    def begin(self, model: str, loaded: str) -> None:
        """`model`, which is being loaded, waits until `loaded` is. `end` follows.

        Raises `InvalidArgument` if `loaded` waits for `model`.
        """
        reached, todo = {loaded}, [loaded]
        while todo:
            waiting = todo.pop()
            new = {each for by, each in self._waits if by == waiting} - reached
            reached |= new
            todo += new
        if model in reached:
            raise InvalidArgument(
                f"model '{loaded}' cannot be loaded by model '{model}': its load waits for the load of '{model}'"
            )
        self._waits.append((model, loaded))

    def end(self, model: str, loaded: str) -> None:
        """A wait that `begin` has noted is over."""
        self._waits.remove((model, loaded))
