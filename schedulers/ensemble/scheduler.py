"""The scheduler of an ensemble: pins models, submits the requests of steps, and sends responses.

`EnsembleProgress` and `StepLimits` decide what starts when. Only the scheduler coroutine calls the driver.

Triton checks BYTES when the request to the ensemble comes, so its errors name the ensemble and its input. Here a worker
of a step checks them, because the kernel does not read tensors. Its error names the step's model and input, and is
written anew for the client.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import (
    InternalError,
    InvalidArgument,
    InvalidRequest,
    RequestCancelled,
    ServingError,
    prefixed,
    request_prefix,
)
from kernel.observe.execution_reports import ComposedTimes
from kernel.observe.limited_log import LimitedLog
from kernel.records.tracer import trace_ensemble_inputs
from kernel.serving.events import Cancelled, ChildResponded, Consumed, DeadlineReached, Submitted
from kernel.serving.response import Response
from schedulers.ensemble.plan import EnsemblePlan, OutputsOnDevices
from schedulers.ensemble.run import Run
from schedulers.ensemble.waits import LONGEST_STALL_NS, LONGEST_WAIT_NS, StalledStreams, StepLimits, feeding_themselves

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kernel.config.spec import EnsembleStep, ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from schedulers.ensemble.progress import StepCall

logger = logging.getLogger(__name__)

_overdue = LimitedLog(logger)

_stalls = LimitedLog(logger, logging.WARNING)


#: How many kinds of requests are remembered: clients choose the shapes.
_MOST_CHECKED = 256


class _StepSink(msgspec.Struct, eq=False):
    """Gives the responses of a step's request to the scheduler of the ensemble."""

    inbox: Inbox
    parent: Request
    #: The request of the step; set before it is submitted.
    request: Request | None = None
    #: Whether the request is being submitted, and the error if it was refused meanwhile.
    submitting: bool = True
    refusal: ServingError | None = None

    @property
    def peer(self) -> str:
        """Requests of steps name no regions."""
        return ""

    def header(self, name: str) -> str:
        """Return a header of the request to the ensemble."""
        return self.parent.sink.header(name)

    def send(self, response: Response) -> None:
        request = self.request
        assert request is not None, "the sink was not given its request, or got a response after the final one"
        if response.final:
            self.request = None  # the request refers to its sink: such a cycle waits for the garbage collector
        if response.refused and self.submitting:
            self.refusal = response.error
        elif self.inbox.open:
            self.inbox.post(ChildResponded(request, response))
        else:  # the ensemble was closed: it has failed its own requests
            response.release()


class EnsembleDriver:
    """The living requests of one version of an ensemble."""

    def __init__(self, spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock, caller: Kernel) -> None:
        assert spec.ensemble is not None
        self._plan = EnsemblePlan(spec, spec.ensemble)
        self._inbox = inbox
        self._instances = instances
        self._clock = clock
        self._caller = caller
        self._version = spec.ensemble.version_text
        limit = spec.ensemble.max_inflight_requests
        self._limits = StepLimits["StepCall"](limit, len(self._plan.steps)) if limit else None
        #: Calls that wait because of the limit; `Run.waiting` has them too.
        self._waiting: dict[StepCall, Run] = {}
        self._runs: dict[Request, Run] = {}
        self._run_of: dict[Request, Run] = {}
        #: The versions of the steps, as long as the models do not change.
        self._models: tuple[Model, ...] = ()
        self._generation = -1
        #: Steps whose models get the credit for their responses at once.
        self._prepaid: Collection[int] = ()
        #: Which outputs of steps stay on a device.
        self._on_devices = OutputsOnDevices(self._plan, (), self._find)
        #: Requests with streams; None if the ensemble cannot have one.
        self._streams = StalledStreams[Run]() if spec.decoupled else None
        #: Whether `until_ns` is ever a time.
        self.has_deadlines = self._streams is not None or self._limits is not None
        #: Step, datatypes and shapes of requests that were checked for these versions → rows.
        self._checked: dict[tuple[Any, ...], int] = {}

    # ---- events ------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Start the first steps of a new request."""
        request.composed = ComposedTimes()
        if request.trace is not None:
            trace_ensemble_inputs(request)
        try:
            models = self._current_models()
            if self._caller.has_rules():
                models = self._models_for(request)
            on_devices = self._on_devices if models is self._models else None
            run = Run(self._plan, request, models, self._clock.now_ns(), self._prepaid, on_devices)
        except ServingError as error:
            request.fail(self._named(error))
            return
        for model in models:
            model.pin()
        self._runs[request] = run
        request.steps = run.calls
        if self._streams is not None:
            self._streams.moved(run, run.started_ns)
        self._start(run, run.begin())
        self._send_or_end(run)
        if self._waiting:
            self._start_waiting()

    def responded(self, child: Request, response: Response) -> None:
        """Take a response of a step."""
        run = self._run_of.get(child)
        if run is None:
            response.release()
            return
        if self._streams is not None:
            self._streams.moved(run, self._clock.now_ns())
        call = run.calls[child]
        if response.final:
            del run.calls[child], self._run_of[child]
        if response.error is not None:
            self._fail(run, about_ensemble(response.error, self._plan.steps[call.step], self._plan.spec))
        elif response.outputs is not None:
            self._take_outputs(run, call, response)
        if response.final:
            if not call.decoupled and not call.responses:
                self._fail(run, self._deadlock(run))
            if self._limits is None:  # usual
                run.progress.ended(call)
            else:
                self._ended(run, call)
        self._send_or_end(run)
        if self._waiting:
            self._start_waiting()

    def cancelled(self, request: Request) -> None:
        """The client of `request` has disconnected: its steps are cancelled, and it fails when they have ended."""
        run = self._runs.get(request)
        if run is not None:
            self._fail(run, RequestCancelled())
            self._send_or_end(run)
            self._start_waiting()

    def consumed(self, request: Request, count: int) -> None:
        """The client took `count` responses of `request`."""
        run = self._runs.get(request)
        if run is not None:
            run.progress.consumed(count)
            self._give_credit(run)

    def continue_overdue(self) -> None:
        """Give credit to streams without progress, and start calls that waited for others of their step."""
        now_ns = self._clock.now_ns()
        for run in () if self._streams is None else self._streams.overdue(now_ns):
            self._prepay(run)
        if self._limits is not None:
            for step in self._limits.begin_iteration(now_ns):
                _overdue.log(
                    f"ensemble '{self._plan.spec.name}'",
                    "ensemble '%s': a request of the step of model '%s' has waited %d s for others of this step "
                    "(max_inflight_requests); it is executed now",
                    self._plan.spec.name, self._plan.steps[step].model_name, LONGEST_WAIT_NS // 1_000_000_000,
                )  # fmt: skip
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Start calls that have waited, as many as an event-loop iteration may."""
        while self._limits is not None and (call := self._limits.next_call()) is not None:
            run = self._waiting[call]
            self._submit(run, call)
            self._send_or_end(run)

    def _prepay(self, run: Run) -> None:
        """Give all streams of a request that makes no progress their credit, unless it waits for its client only."""
        if run.progress.in_flight == sum(call.decoupled for call in run.calls.values()):
            return
        for child, call in list(run.calls.items()):
            if call.decoupled and not call.prepaid:
                _stalls.log(
                    f"ensemble '{self._plan.spec.name}'",
                    "ensemble '%s': no step of a request has responded for %d s; model '%s' may send more responses, "
                    "in case a later step waits for them",
                    self._plan.spec.name, LONGEST_STALL_NS // 1_000_000_000, child.model_name,
                )  # fmt: skip
                child.consumed(run.progress.prepay(call))

    @property
    def until_ns(self) -> int | None:
        """When to call `continue_overdue`, or None."""
        if self._streams is None:  # usual
            return None if self._limits is None else self._limits.until_ns
        times = (self._streams.until_ns, None if self._limits is None else self._limits.until_ns)
        return min((time_ns for time_ns in times if time_ns is not None), default=None)

    def close(self) -> None:
        """End all requests without responses: who closes the scheduler fails them."""
        for run in self._runs.values():
            run.progress.drop()
            calls = list(run.calls)
            run.calls.clear()
            for child in calls:
                child.cancel()
            for model in run.models:
                model.unpin()
        self._runs.clear()
        self._run_of.clear()
        self._waiting.clear()

    def check(self) -> None:
        """Recompute the invariants."""
        assert self._run_of.keys() == {child for run in self._runs.values() for child in run.calls}
        assert self._waiting.keys() == {call for run in self._runs.values() for call in run.waiting}
        for run in self._runs.values():
            run.progress.check()
            assert not run.waiting or run.error is None
        if self._limits is not None:
            self._limits.check()

    # ---- steps -------------------------------------------------------------------------------

    def _current_models(self) -> tuple[Model, ...]:
        """Return the versions that the steps use now. Raises `ServingError`."""
        generation = self._caller.generation
        if generation != self._generation:
            resolve = self._caller.resolve
            self._models = tuple(
                resolve(step.model_name, step.model_version, step.namespace) for step in self._plan.steps
            )
            self._prepaid = feeding_themselves(self._plan, self._models, resolve)
            self._on_devices = OutputsOnDevices(self._plan, self._models, self._find)
            self._generation = generation
            self._checked.clear()
        return self._models

    def _models_for(self, request: Request) -> tuple[Model, ...]:
        """Return the versions of the steps for one request, by the rules of their models. Raises `ServingError`."""
        chosen = tuple(
            self._caller.resolve_for(request, request, step.model_name, step.model_version, step.namespace)
            for step in self._plan.steps
        )
        return self._models if chosen == self._models else chosen

    def _find(self, name: str, version: str, namespace: str) -> Model | None:
        try:
            return self._caller.resolve(name, version, namespace)
        except ServingError:
            return None

    def _start(self, run: Run, calls: Iterable[StepCall]) -> None:
        limits = self._limits
        for call in calls:
            if run.error is not None:  # an earlier one of these could not be submitted
                run.progress.ended(call)
            elif limits is None or limits.start(call.step, call, self._clock.now_ns()):
                self._submit(run, call)
            else:
                self._waiting[call] = run
                run.waiting[call] = None

    def _submit(self, run: Run, call: StepCall) -> None:
        if self._waiting and self._waiting.pop(call, None) is not None:
            del run.waiting[call]
        sink = _StepSink(self._inbox, run.request)
        child = sink.request = run.request_of(call, sink)
        run.calls[child] = call
        self._run_of[child] = run
        checked = self._checked
        parts: list[str | int] = [call.step]
        for tensor in child.inputs:
            data, span = tensor.data, tensor.span
            byte_size = len(data) if data is not None else 0 if span is None else span.byte_size
            parts += (tensor.name, tensor.datatype, byte_size, *tensor.shape)
        key = tuple(parts)
        rows = checked.get(key) if run.models is self._models else None
        if rows is None:
            self._caller.submit(child, pinned=run.models[call.step], checked=False)
        else:
            child.batch_size = rows
            self._caller.submit(child, pinned=run.models[call.step], checked=True)
        sink.submitting = False
        if sink.refusal is not None:
            del run.calls[child], self._run_of[child]
            self._fail(run, sink.refusal)
            self._ended(run, call)
        elif rows is None and run.models is self._models and len(checked) < _MOST_CHECKED:
            checked[key] = child.batch_size

    def _take_outputs(self, run: Run, call: StepCall, response: Response) -> None:
        if run.error is not None:
            response.release()
        elif call.responses and not call.decoupled:
            response.release()
            self._fail(run, InternalError("expected a single response, got 2"))
        else:
            self._start(run, run.progress.responded(call, run.outputs_of(call, response)))

    def _ended(self, run: Run, call: StepCall) -> None:
        """A call that ran has ended."""
        run.progress.ended(call)
        if self._limits is not None:
            self._limits.ended(call.step)  # the next call does not start here: it may fail at once, too

    def _give_credit(self, run: Run) -> None:
        credits, run.progress.credits = run.progress.credits, []
        if credits:
            calls = set(credits)
            for child, call in list(run.calls.items()):
                if call in calls:
                    child.consumed(credits.count(call))

    # ---- responses ---------------------------------------------------------------------------

    def _send_or_end(self, run: Run) -> None:
        """Send the responses that are complete; end the request if no call is in flight."""
        progress, request = run.progress, run.request
        if run.error is None and progress.may_send:
            while (response := run.next_response(self._version)) is not None:
                for name in run.left_out:
                    logger.debug("Composing models did not output tensor %s", name)  # Triton's line
                if not progress.in_flight and not progress.stuck:
                    self._end(run)
                    response.final = True
                    request.respond(response)
                    self._instances.executed_by_steps(request, run.started_ns)
                    return
                request.respond(response)
        if progress.credits:
            self._give_credit(run)
        if progress.in_flight or request not in self._runs:
            return
        if run.error is None and progress.stuck:
            run.error = self._deadlock(run)
        self._end(run)
        if run.error is None:
            request.respond(Response(self._plan.spec.name, self._version, request.id, final=True))
            self._instances.executed_by_steps(request, run.started_ns)
        elif isinstance(run.error, RequestCancelled) and request.cancelled:
            request.fail(run.error)
        else:
            request.fail(self._named(run.error))

    def _fail(self, run: Run, error: ServingError) -> None:
        """Fail the request when its calls have ended. They are cancelled: nobody needs their responses."""
        if run.error is not None:
            return
        run.error = error
        run.progress.drop()
        for call in run.waiting:
            assert self._limits is not None
            del self._waiting[call]
            run.progress.ended(call)
            self._limits.remove(call.step, call)
        run.waiting.clear()
        for child in list(run.calls):
            child.cancel()

    def _deadlock(self, run: Run) -> InvalidArgument:
        return InvalidArgument(
            f"{request_prefix(run.request.id)}unexpected deadlock, at least one output is not set while no more "
            "ensemble steps can be made"
        )

    def _end(self, run: Run) -> None:
        run.progress.drop()  # what steps behind a stream would have read that has sent nothing
        del self._runs[run.request]
        if self._streams is not None:
            self._streams.remove(run)
        for model in run.models:
            model.unpin()

    def _named(self, error: ServingError) -> ServingError:
        if isinstance(error, WrongEnsembleInput):
            return error
        return prefixed(f"in ensemble '{self._plan.spec.name}', ", error)


class WrongEnsembleInput(InvalidRequest):
    """An input of the request to the ensemble is wrong."""


def about_ensemble(error: ServingError, step: EnsembleStep, ensemble: ModelSpec) -> ServingError:
    """Return the error of a step as one about the ensemble's input, if it is about what the step reads of that.

    The text is Triton's (`backends/worker/inputs.py`). Any other error is returned as it is.
    """
    if error.before_queueing:
        for name, tensor in step.inputs.items():
            found = _title(name, step.model_name)
            if tensor in ensemble.inputs and found in error.message:
                return WrongEnsembleInput(error.message.replace(found, _title(tensor, ensemble.name), 1))
    return error


def _title(tensor: str, model: str) -> str:
    return f"for inference input '{tensor}' for model '{model}'"


async def ensemble(spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock, *, caller: Kernel) -> None:
    """Schedule an ensemble: its steps are requests to other models, submitted through `caller`."""
    driver = EnsembleDriver(spec, inbox, instances, clock, caller)
    try:
        until_ns: int | None = None
        while True:
            match await inbox.next(until_ns):
                case ChildResponded(child=child, response=response):
                    driver.responded(child, response)
                case Submitted(request=request):
                    driver.begin(request)
                case Consumed(request=request, count=count):
                    driver.consumed(request, count)
                case Cancelled(request=request):
                    driver.cancelled(request)
                case DeadlineReached():
                    driver.continue_overdue()
            if driver.has_deadlines:
                until_ns = driver.until_ns
    finally:
        driver.close()
