"""Calls between models: errors, and calls that can never be executed. With fake instances that execute for ever."""

from __future__ import annotations

import functools
import itertools

import msgspec
import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import DynamicBatching, EnsembleSpec
from kernel.errors import ErrorCode, InvalidArgument, ServingError
from kernel.serving.calls import DOUBT_NS, Execution, NestedLoads
from kernel.serving.catalog import ModelState
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import FakeInstance, RecordingSink
from schedulers.ratelimit import InstanceGate, RateLimiter, parse_limits
from schedulers.registry import choose_scheduler
from schedulers.testing import KernelLab, spec_of, step
from shm.tensor import RequestedOutput, Tensor
from tests.executed_lines import executed_lines

ORDERED = DynamicBatching(preserve_ordering=True)

STUCK = "waits, itself or through calls of other models, for this request"


class CallLab(KernelLab):
    """Models with instances that execute what they get until the test ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[FakeInstance]] = {}

    def model(
        self,
        name: str,
        instances: int = 1,
        *,
        concurrency: int = 1,
        decoupled: bool = False,
        batching: DynamicBatching | None = None,
    ) -> Model:
        spec = msgspec.structs.replace(spec_of(name, "IN", "OUT", decoupled=decoupled), dynamic_batching=batching)
        schedule = functools.partial(choose_scheduler, caller=self.kernel)
        model = Model(spec, ModelConfig(name=name), 1, schedule, self.clock)
        model.start()
        self.kept[name] = [FakeInstance(f"{name}_{number}", concurrency) for number in range(instances)]
        for instance in self.kept[name]:
            model.instances.add(instance)
        self.catalog.set_state(name, 1, ModelState.READY, model=model)
        return model

    def ensemble(self, name: str, *models: str) -> None:
        steps = tuple(
            step(model, {"IN": "IN" if n == 0 else f"T{n}"}, {"OUT": "OUT" if n == len(models) - 1 else f"T{n + 1}"})
            for n, model in enumerate(models)
        )
        self.add(spec_of(name, "IN", "OUT", ensemble=EnsembleSpec(steps)))

    def ask(self, name: str) -> Request:
        """Send the request of a client."""
        request, _ = self.submit(name, "IN")
        self.start(request)
        return request

    def call(  # type: ignore[override]  # it makes calls
        self, caller: Request | None, name: str, *, blocking: bool = True, streaming: bool = False, inputs: str = "IN"
    ) -> Request:
        """Let the model that executes `caller` call another one."""
        tensors = [Tensor(each, "FP32", [1], bytes(4)) for each in inputs.split()]
        outputs = [RequestedOutput("OUT")]
        sink = CallSink(self)
        call = sink.call = Request(name, tensors, sink, outputs=outputs, streaming=True, parent=caller)
        self.kernel.calls.submit(call, self.execution(caller, blocking), streaming=streaming)
        self.start(call)
        return call

    def execution(self, caller: Request | None, blocking: bool) -> Execution | None:
        for instances in self.kept.values():
            for instance in instances:
                for batch in instance.batches:
                    if caller in batch.requests:
                        return Execution(instance, batch.number, blocking)
        return None

    def start(self, request: Request) -> None:
        """Note that an instance with a concurrency above 1 has begun to execute what it has."""
        for instance in (each for instances in self.kept.values() for each in instances):
            if instance.record.concurrency > 1:
                for batch in instance.batches:
                    instance.record.started(batch.number)

    def finish(self, request: Request) -> None:
        request.respond(Response(request.model_name, "1", request.id, outputs=[]))


def refusal(call: Request) -> ServingError:
    """Return the error with which a call was refused at once."""
    assert isinstance(call.sink, RecordingSink)
    [response] = call.sink.responses
    assert response.error is not None
    return response.error


class CallSink(RecordingSink):
    """Does what the sink of a worker's call does."""

    def __init__(self, lab: CallLab) -> None:
        super().__init__()
        self._lab = lab
        self.call: Request

    def send(self, response: Response) -> None:
        if response.error is not None:
            response.error = self._lab.kernel.calls.error_of(self.call, response.error, was_refused=response.refused)
        self._lab.kernel.calls.ended(self.call)
        super().send(response)


@pytest.fixture
def lab() -> CallLab:
    return CallLab()


def error_of(call: Request) -> str:
    sink = call.sink
    assert isinstance(sink, RecordingSink)
    (error,) = sink.errors
    return error.message


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
def test_a_call_leaves_at_once_if_its_caller_waits_and_an_instance_is_free(lab: CallLab, *, blocking: bool) -> None:
    lab.model("caller")
    lab.model("called")
    request = lab.ask("caller")
    lab.call(request, "called", blocking=blocking)
    [called] = lab.kept["called"]
    assert called.sent_now == blocking, "the calls of an event loop share a send"
    lab.call(request, "called", blocking=blocking)
    assert called.sent_now == blocking, "the second call waits behind the first one"


def test_a_model_that_is_not_there_is_named(lab: CallLab) -> None:
    with pytest.raises(ServingError) as found:
        lab.call(None, "nothing")
    assert found.value.code is ErrorCode.INTERNAL
    assert found.value.message == (
        "Model nothing - Error when running inference: Request for unknown model: 'nothing' is not found"
    )


def test_what_the_model_refuses_has_the_code_internal(lab: CallLab) -> None:
    lab.model("m")
    error = refusal(lab.call(None, "m", inputs=""))
    assert error.code is ErrorCode.INTERNAL
    assert error.message.startswith("Model m - Error when running inference: [request id: <id_unknown>] expected 1")
    assert not lab.kept["m"][0].batches


def test_a_decoupled_model_needs_a_call_that_takes_several_responses(lab: CallLab) -> None:
    lab.model("m", decoupled=True)
    with pytest.raises(ServingError, match="^Model m - Error when running inference: Model m is using the decoupled"):
        lab.call(None, "m")
    assert not lab.call(None, "m", streaming=True).finished


def test_a_call_is_admitted_while_the_server_stops_if_its_caller_was_admitted(lab: CallLab) -> None:
    lab.model("a")
    lab.model("b")
    caller = lab.ask("a")
    lab.kernel.stopping = True
    assert not lab.call(caller, "b").finished
    assert "Server is stopping" in refusal(lab.call(None, "b")).message


# ---- calls that are stuck -----------------------------------------------------------------------


def test_a_model_with_one_instance_that_calls_itself_gets_an_error_at_once(lab: CallLab) -> None:
    lab.model("m")
    caller = lab.ask("m")
    call = lab.call(caller, "m")
    assert STUCK in error_of(call)
    assert not caller.finished
    lab.check()


def test_with_a_second_instance_it_can_call_itself_once(lab: CallLab) -> None:
    lab.model("m", 2)
    first = lab.call(lab.ask("m"), "m")
    assert not first.finished
    second = lab.call(first, "m")
    assert STUCK in error_of(second)
    lab.finish(first)
    lab.check()


def test_a_circle_of_models_fails_where_it_closes(lab: CallLab) -> None:
    for name in "abc":
        lab.model(name)
    first = lab.call(lab.ask("a"), "b")
    second = lab.call(first, "c")
    third = lab.call(second, "a")
    assert [first.finished, second.finished] == [False, False]
    assert STUCK in error_of(third)


def test_two_models_that_call_each_other_at_the_same_time_do_not_wait_for_ever(lab: CallLab) -> None:
    lab.model("a")
    lab.model("b")
    one, other = lab.ask("a"), lab.ask("b")
    waiting = lab.call(one, "b")
    assert not waiting.finished, "the instance of b may still end what it executes"
    failed = lab.call(other, "a")
    assert STUCK in error_of(failed)
    assert not waiting.finished


def test_a_call_that_waits_behind_other_work_is_not_stuck(lab: CallLab) -> None:
    lab.model("a")
    lab.model("b")
    lab.ask("b")
    call = lab.call(lab.ask("a"), "b")
    lab.clock.advance(10_000_000_000)
    assert not call.finished


def test_a_call_of_an_ensemble_whose_step_is_the_caller_is_stuck(lab: CallLab) -> None:
    lab.model("a")
    lab.model("b")
    lab.ensemble("e", "b", "a")
    caller = lab.ask("a")
    call = lab.call(caller, "e")
    assert not call.finished, "its first step goes on"
    step_of_b = lab.kept["b"][0].batches[0].requests[0]
    step_of_b.respond(Response("b", "1", "", outputs=[Tensor("OUT", "FP32", [1], bytes(4))]))
    lab.clock.advance(1_000_000_000)
    assert STUCK in error_of(call)
    lab.check()


def test_a_model_that_is_called_by_a_step_may_not_need_the_ensembles_caller(lab: CallLab) -> None:
    lab.model("a")
    lab.model("b")
    lab.ensemble("e", "b")
    call = lab.call(lab.ask("a"), "e")
    step_of_b = lab.kept["b"][0].batches[0].requests[0]
    failed = lab.call(step_of_b, "a")
    assert STUCK in error_of(failed)
    assert not call.finished


def test_the_work_of_a_call_of_an_ensemble_does_not_grow_with_the_requests_before_it() -> None:
    def work(count: int) -> int:
        lab = CallLab()
        lab.model("a")
        lab.model("b")
        lab.ensemble("e", "b")
        caller = lab.ask("a")
        for _ in range(count):
            lab.submit("e", "IN")
        lines = executed_lines(lambda: lab.call(caller, "e"))
        lab.kernel.abandon()
        return lines

    assert work(200) == work(100)


def test_a_thread_that_calls_is_waited_for_a_while_before_its_call_counts(lab: CallLab) -> None:
    lab.model("m")
    caller = lab.ask("m")
    call = lab.call(caller, "m", blocking=False)
    assert not call.finished
    lab.clock.advance(DOUBT_NS - 100_000_000)
    assert not call.finished
    lab.clock.advance(1_000_000_000 - DOUBT_NS + 100_000_000)
    assert STUCK in error_of(call), "a model that calls itself has its error within a second"


def test_an_instance_that_executes_several_batches_is_free_as_long_as_one_is(lab: CallLab) -> None:
    lab.model("m", concurrency=2)
    caller = lab.ask("m")
    first = lab.call(caller, "m")
    assert not first.finished
    assert STUCK in error_of(lab.call(first, "m"))


def test_a_call_that_has_ended_blocks_nobody(lab: CallLab) -> None:
    lab.model("a")
    lab.model("b")
    caller = lab.ask("a")
    first = lab.call(caller, "b")
    lab.finish(first)
    instance = lab.kept["b"][0]
    instance.record.batches.clear()
    instance.batches.clear()
    assert not lab.call(caller, "b").finished
    lab.clock.advance(10_000_000_000)
    lab.check()


def test_an_instance_that_is_lost_and_started_again_is_waited_for(lab: CallLab) -> None:
    lab.model("a")
    model = lab.model("b")
    model.instances.forget(lab.kept["b"][0])
    call = lab.call(lab.ask("a"), "b")
    lab.clock.advance(10_000_000_000)
    assert not call.finished


def test_a_thousand_calls_that_wait_are_looked_at_in_parts(lab: CallLab) -> None:
    lab.model("a")
    lab.model("b")
    caller = lab.ask("a")
    calls = [lab.call(caller, "b") for _ in range(1000)]
    lab.clock.advance(5_000_000_000)
    assert not any(call.finished for call in calls)
    back = lab.call(calls[0], "a")
    assert STUCK in error_of(back)
    lab.check()


# ---- models whose responses have the order of requests ------------------------------------------


def test_a_model_that_calls_itself_gets_the_response_before_it_has_responded(lab: CallLab) -> None:
    lab.model("m", 2, batching=ORDERED)
    caller = lab.ask("m")
    lab.clock.end_iteration()
    call = lab.call(caller, "m")
    lab.clock.end_iteration()
    lab.finish(call)
    assert isinstance(call.sink, CallSink)
    assert [response.error for response in call.sink.responses] == [None]
    lab.check()


def test_a_call_does_not_wait_for_a_request_that_waits_for_its_caller(lab: CallLab) -> None:
    lab.model("a")
    lab.model("b", 2, batching=ORDERED)
    one = lab.ask("a")
    other = lab.ask("b")
    lab.clock.end_iteration()
    waiting = lab.call(other, "a")  # the only instance of a executes `one`
    call = lab.call(one, "b")
    lab.clock.end_iteration()
    lab.finish(call)
    assert isinstance(call.sink, CallSink)
    assert len(call.sink.responses) == 1, "it comes although `other` was dispatched to b before"
    assert not waiting.finished
    lab.check()


# ---- under the rate limiter ---------------------------------------------------------------------


def limited(model: Model, limiter: RateLimiter, count: int) -> None:
    """Let each instance of `model` need `count` of the resource R."""
    config = ModelConfig(name=model.name)
    group = config.instance_group.add(name=model.name, count=1)
    group.rate_limiter.resources.add(name="R", count=count)
    gate = InstanceGate(model, limiter)
    gate.change(config)
    model.instances.limit(gate)


@pytest.mark.parametrize(("there", "stuck"), [(1, True), (2, False)])
def test_a_call_that_needs_the_resources_of_its_caller_is_stuck(lab: CallLab, there: int, stuck: bool) -> None:
    limiter = RateLimiter(parse_limits([f"R:{there}"]))
    for name in "ab":
        limited(lab.model(name), limiter, 1)
    call = lab.call(lab.ask("a"), "b")
    assert call.finished is stuck
    assert call.dispatched is not stuck


def test_a_call_that_needs_the_resources_of_a_model_that_computes_waits(lab: CallLab) -> None:
    limiter = RateLimiter(parse_limits(["R:2"]))
    for name in "abc":
        limited(lab.model(name), limiter, 1)
    lab.ask("c")
    call = lab.call(lab.ask("a"), "b")
    lab.clock.advance(5_000_000_000)
    assert not call.finished


def test_models_may_load_others_while_they_are_loaded() -> None:
    loads = NestedLoads()
    loads.begin("a", "b")
    loads.begin("b", "c")
    loads.begin("a", "c")
    loads.end("a", "b")
    loads.begin("b", "a")


@pytest.mark.parametrize("chain", ["aa", "aba", "abca"])
def test_a_load_that_would_wait_for_itself_is_refused(chain: str) -> None:
    loads = NestedLoads()
    for model, loaded in itertools.pairwise(chain[:-1]):
        loads.begin(model, loaded)
    with pytest.raises(InvalidArgument, match=f"model 'a' cannot be loaded by model '{chain[-2]}'"):
        loads.begin(chain[-2], "a")
