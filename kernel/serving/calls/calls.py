"""Requests that models send to other models.

A call goes through `Kernel.submit` like any other request. It has the caller's request as its parent: it is admitted
also while the server drains, and is charged to no quota again. Error texts are Triton's (`RequestExecutor::Infer` in
python_backend's request_executor.cc).
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

from kernel.errors import InternalError, ServingError, Unavailable
from kernel.observe.repeats.limited_log import LimitedLog
from kernel.serving.calls.call_waits import CallWaits

if TYPE_CHECKING:
    from kernel.loop.clock import Alarm, Clock
    from kernel.serving.calls.call_waits import Execution, LiveModels
    from kernel.serving.instance import Instance
    from kernel.serving.model import Model
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

    def __init__(self, target: CallTarget, models: LiveModels, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        self._waits = CallWaits(models)
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
        self._waits.add(call, execution, self._clock.now_ns())
        if execution.blocking:
            instance = _executing_at_once(call, model)
            if instance is None:
                self._look_at(call)
            else:  # the calling thread does nothing but wait for the response
                instance.send_now()
        if self._alarm is None:
            self._alarm = self._clock.alarm(self._look)
        if len(self._waits) == 1:
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
        self._waits.remove(call)
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
            self._to_look_at.extend(self._waits.waiting())
        for _ in range(min(len(self._to_look_at), _MOST_LOOKED_AT)):
            call = self._to_look_at.popleft()
            if not call.finished:
                self._look_at(call)
        if len(self._waits) and self._alarm is not None:
            self._alarm.set(self._clock.now_ns() + _LOOK_NS)

    def _look_at(self, call: Request) -> None:
        """Fail a call if `call` is stuck: then the others continue."""
        stuck = self._waits.youngest_stuck(call, self._clock.now_ns())
        if stuck is not None and stuck not in self._stuck:
            _failures.log(
                f"calls of model '{stuck.model_name}'",
                "a call of model '%s' fails: all instances that could execute it wait for this call", stuck.model_name,
            )  # fmt: skip
            self._stuck.add(stuck)
            stuck.cancel()

    def check(self) -> None:
        """Recompute the invariants; for tests."""
        self._waits.check()


def _executing_at_once(call: Request, model: Model) -> Instance | None:
    """Return the instance to which a submitted call was dispatched, if it has no other batch before it."""
    instance = model.live.instance_of.get(call)
    if instance is None or len(instance.record.batches) > instance.record.concurrency:
        return None
    return instance


def refused(call: Request, error: ServingError) -> ServingError:
    """Return the error of a call that its model has not queued. Triton gives all of them the code INTERNAL."""
    return InternalError(f"Model {call.model_name} - Error when running inference: {error.message}")
