"""Traces of requests from `Kernel.submit` to their end: names and times, children, samplers, explanations.

One file, because its tests share the kernel and the front doors that it begins with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel import errors
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import InputPlacer
from kernel.observe.execution_reports import ExecutionTimes
from kernel.observe.metrics_config import MetricsConfig
from kernel.records.front_doors import GRPC, HTTP, Reception
from kernel.records.trace import (
    BACKEND_OUTPUT,
    USUAL_TAG,
    TensorMemory,
    TracedExecution,
    TracedTensor,
    TraceRecord,
    UsualTrace,
)
from kernel.records.trace_json import record_of, tensor_text
from kernel.records.tracer import Tracer
from kernel.serving.batch import Batch
from kernel.serving.catalog import Catalog, ModelState
from kernel.serving.interface import KernelSettings
from kernel.serving.kernel import Kernel
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.settings import LogSettings, TraceSettings, TraceValues
from kernel.testing import FakeClock, FakeInstance, RecordingSink, model_spec
from schedulers.direct import direct
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.records.trace import Trace, UsualValues

EVERY = TraceValues(("TIMESTAMPS",), trace_rate=1, trace_file="/t")
COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


class Door(RecordingSink):
    """A sink of a front door, which has received its request at once."""

    def reception(self) -> Reception:
        return HTTP, 3, 4, None


class LaterDoor(RecordingSink):
    """A sink of a front door that writes later: the test calls what waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] = []

    def reception(self) -> Reception:
        return GRPC, 3, 4, self.waiting.append


class RecordsNothing:
    """A recorder that sees each request."""

    def begin(self, request: Request, model: Model) -> None:
        pass

    def refused(self, request: Request, model: Model, error: errors.ServingError) -> None:
        pass


class Recorder:
    def __init__(self) -> None:
        self.records: list[TraceRecord] = []

    def put(self, record: TraceRecord) -> None:
        self.records.append(record)

    def put_usual(self, values: UsualValues, now_ns: Callable[[], int]) -> None:
        usual = msgspec.msgpack.decode(msgspec.msgpack.encode((USUAL_TAG, now_ns(), values)), type=UsualTrace)
        self.records.append(record_of(usual))


class Bench:
    """A kernel with the models `m` and `n`, of one fake instance each."""

    def __init__(self, values: TraceValues) -> None:
        self.settings = TraceSettings(values)
        self.clock = FakeClock()
        catalog = Catalog()
        self.regions = RegionRegistry()
        self.kernel = Kernel(
            catalog, self.regions, InputPlacer(self.regions, 1 << 20), self.clock,
            KernelSettings(self.settings, LogSettings()), Tracer(self.settings, self.clock),
        )  # fmt: skip
        self.written = Recorder()
        self.kernel.tracer.start(lambda values: self.written)
        self.models = []
        for name in ("m", "n"):
            model = Model(model_spec(name, dims=(-1,)), ModelConfig(), 1, direct, self.clock)
            model.start()
            model.instances.add(FakeInstance(name))
            catalog.set_state(name, 1, ModelState.READY, "", model)
            self.models.append(model)

    def submit(self, model: str = "m", sink: RecordingSink | None = None, **more: object) -> Request:
        tensor = Tensor("IN", "FP32", [1], bytes(4))
        request = Request(model, [tensor], sink or Door(), id="r", **more)  # type: ignore[arg-type]
        self.kernel.submit(request)
        return request

    def traced(self, *models: str) -> list[bool]:
        return [self.submit(model).trace is not None for model in models]

    def close(self) -> None:
        for model in self.models:
            model.close(errors.ServerStopping(""))
        self.regions.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(EVERY)
    yield made
    made.close()


def times_from(start_ns: int) -> ExecutionTimes:
    return ExecutionTimes(start_ns, start_ns + 1, start_ns + 2, start_ns + 3)


def trace_of(request: Request) -> Trace:
    assert request.trace is not None
    return request.trace


def answer(request: Request) -> None:
    request.respond(Response("m", "1", "r", outputs=[]))


def test_the_sink_of_a_traced_request_stays_that_of_its_front_door(bench: Bench) -> None:
    door = Door()
    request = bench.submit(sink=door)
    assert request.trace is not None
    assert request.sink is door
    answer(request)
    assert [response.final for response in door.responses] == [True]


def names(record: TraceRecord) -> list[str]:
    return [name for name, _ in record.pairs()]


def test_a_request_is_traced_from_its_reception_to_the_last_byte_sent(bench: Bench) -> None:
    request = bench.submit()
    trace = trace_of(request)
    trace.executing += 1
    trace.executed(times_from(request.queue_start_ns))
    bench.clock.advance(10)
    answer(request)
    [record] = bench.written.records
    assert (record.id, record.parent_id, record.model_name, record.model_version, record.request_id) == (
        1,
        0,
        "m",
        1,
        "r",
    )
    assert names(record) == [
        "HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START", *COMPUTE, "INFER_RESPONSE_COMPLETE",
        "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END",
    ]  # fmt: skip


def dispatched(request: Request) -> Batch:
    """Return the batch of a request that an instance has got in the usual way."""
    batch = Batch([request], traced=True)
    trace = trace_of(request)
    assert trace.usual
    assert trace.batch is None
    trace.batch = batch
    return batch


@pytest.mark.parametrize("door", [Door, LaterDoor])
def test_a_usual_trace_has_the_times_of_its_batch_and_all_names(bench: Bench, door: type[RecordingSink]) -> None:
    sink = door()
    request = bench.submit(sink=sink)
    batch = dispatched(request)
    batch.times = times_from(request.queue_start_ns)
    answer(request)
    for sent in getattr(sink, "waiting", ()):
        bench.clock.advance(7)
        sent()
    [record] = bench.written.records
    now_ns, start_ns, queued_ns = bench.clock.now_ns(), request.received_ns, request.queue_start_ns
    names = ("GRPC_WAITREAD", "GRPC_SEND") if door is LaterDoor else ("HTTP_RECV", "HTTP_SEND")
    end_ns = now_ns - 7 * (door is LaterDoor)
    assert (record.id, record.model_name, record.model_version, record.request_id) == (1, "m", 1, "r")
    assert record.times == [
        f"{names[0]}_START", 3, f"{names[0]}_END", 4, "REQUEST_START", start_ns, "QUEUE_START", queued_ns,
        "COMPUTE_START", queued_ns, "COMPUTE_INPUT_END", queued_ns + 1, "COMPUTE_OUTPUT_START", queued_ns + 2,
        "COMPUTE_END", queued_ns + 3, "INFER_RESPONSE_COMPLETE", end_ns, "REQUEST_END", end_ns,
        f"{names[1]}_START", end_ns, f"{names[1]}_END", now_ns,
    ]  # fmt: skip
    assert not batch.notifies_traces


def test_a_usual_trace_survives_the_loss_of_its_instance(bench: Bench) -> None:
    request = bench.submit()
    dispatched(request)
    trace_of(request).not_executed()
    dispatched(request).times = times_from(10)
    answer(request)
    [record] = bench.written.records
    assert names(record).count("COMPUTE_START") == 1


def test_a_trace_is_notified_of_the_end_of_an_execution_that_its_request_did_not_wait_for(bench: Bench) -> None:
    request = bench.submit()
    batch = dispatched(request)
    request.fail(errors.RequestCancelled())
    assert bench.written.records == []
    assert batch.notifies_traces
    assert not trace_of(request).usual
    trace_of(request).executed(times_from(10))
    [record] = bench.written.records
    assert [name for name in names(record) if name in COMPUTE] == COMPUTE


def test_a_request_that_is_executed_a_second_time_has_the_times_of_both(bench: Bench) -> None:
    request = bench.submit()
    dispatched(request).times = times_from(10)
    trace, second = trace_of(request), Batch([request], traced=True)
    trace.begin_execution(second)
    assert second.notifies_traces
    trace.executed(times_from(20))
    answer(request)
    [record] = bench.written.records
    assert [at_ns for name, at_ns in record.pairs() if name == "COMPUTE_START"] == [10, 20]


def test_a_traced_request_that_succeeds_is_an_example_of_its_latency(bench: Bench) -> None:
    request, failing = bench.submit(), bench.submit("n")
    bench.clock.advance(3_000_000)
    answer(request)
    failing.fail(errors.InternalError("no"))
    exemplars = [model.statistics.exemplars for model in bench.models]
    assert exemplars[0] is not None
    (exemplar,) = filter(None, exemplars[0].found)
    assert (exemplar.value, exemplar.trace_id) == (3_000_000, str(trace_of(request).id))
    assert exemplars[1] is None


def test_the_first_response_of_a_traced_stream_is_an_example_of_its_latency(bench: Bench) -> None:
    statistics = bench.models[0].statistics
    statistics.decoupled = True
    statistics.configure(MetricsConfig(histogram_latencies=True), ModelConfig())
    request = bench.submit()
    for _ in range(2):
        bench.clock.advance(30_000_000)
        request.respond(Response("m", "1", "r", outputs=[], final=False))
    bench.clock.advance(30_000_000)
    request.respond(Response("m", "1", "r"))
    found = [each.found for each in (statistics.first_exemplars, statistics.exemplars) if each is not None]
    assert [[each.value for each in filter(None, exemplars)] for exemplars in found] == [[30], [90_000_000]]


def test_a_trace_waits_until_its_front_door_has_written_the_response(bench: Bench) -> None:
    door = LaterDoor()
    answer(bench.submit(sink=door))
    assert bench.written.records == []
    bench.clock.advance(7)
    (sent,) = door.waiting
    sent()
    (record,) = bench.written.records
    assert record.times[-2:] == ["GRPC_SEND_END", bench.clock.now_ns()]


def test_a_trace_waits_for_the_times_of_an_execution_that_ends_after_the_response(bench: Bench) -> None:
    request = bench.submit()
    trace = trace_of(request)
    trace.executing += 1
    answer(request)
    assert bench.written.records == []
    trace.executed(times_from(10))
    assert [name for name in names(bench.written.records[0]) if name in COMPUTE] == COMPUTE


def test_a_trace_of_a_request_whose_worker_is_lost_ends_with_its_error(bench: Bench) -> None:
    request = bench.submit()
    trace_of(request).executing += 1
    trace_of(request).not_executed()
    request.fail(errors.InternalError("the worker was lost"))
    [record] = bench.written.records
    assert record.error == "the worker was lost"
    assert names(record)[-3:] == ["REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"]


def test_a_cancelled_request_is_traced_to_its_end(bench: Bench) -> None:
    request = bench.submit()
    trace_of(request).executing += 1
    bench.kernel.cancel(request)
    assert bench.written.records == []
    trace_of(request).executed(times_from(10))
    request.fail(errors.RequestCancelled())
    assert names(bench.written.records[0])[-1] == "HTTP_SEND_END"


def test_each_response_of_a_stream_is_noted_and_its_end_is_not_sent(bench: Bench) -> None:
    request = bench.submit(streaming=True)
    for _ in range(2):
        request.respond(Response("m", "1", "r", outputs=[], final=False))
    request.respond(Response("m", "1", "r"))
    [record] = bench.written.records
    assert names(record).count("HTTP_SEND_START") == names(record).count("HTTP_SEND_END") == 2
    assert names(record).count("INFER_RESPONSE_COMPLETE") == 1
    assert names(record)[-1] == "REQUEST_END"


def test_a_response_in_shared_memory_is_sent_when_it_is_released(bench: Bench) -> None:
    sink = Door()
    request = bench.submit(sink=sink)
    request.respond(Response("m", "1", "r", outputs=[], leased=True))
    assert bench.written.records == []
    sink.responses[0].release()
    sink.responses[0].release()
    assert names(bench.written.records[0])[-1] == "HTTP_SEND_END"


def test_a_child_has_no_times_of_a_front_door_and_names_its_parent(bench: Bench) -> None:
    parent = bench.submit()
    child = bench.submit("n", RecordingSink(), parent=parent, trace_parent=parent)
    answer(child)
    [record] = bench.written.records
    assert (record.id, record.parent_id, record.model_name) == (2, 1, "n")
    assert names(record) == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]


def test_a_child_ends_before_its_parent_which_may_respond_within_its_response(bench: Bench) -> None:
    parent = bench.submit()

    class Step(RecordingSink):
        def send(self, response: Response) -> None:
            answer(parent)

    answer(bench.submit("n", Step(), parent=parent, trace_parent=parent))
    assert [record.id for record in bench.written.records] == [2, 1]


def test_a_call_of_a_model_without_a_trace_is_not_traced(bench: Bench) -> None:
    parent = bench.submit()
    assert bench.submit("n", RecordingSink(), parent=parent).trace is None


def test_nothing_is_traced_while_the_level_is_off() -> None:
    bench = Bench(TraceValues(trace_rate=1, trace_file="/t"))
    assert bench.traced("m") == [False]
    assert not bench.kernel.traces
    bench.settings.update({"trace_level": ["TIMESTAMPS"]}, "n")
    assert bench.kernel.traces
    assert bench.traced("m", "n") == [False, True]
    bench.settings.update({"trace_level": None}, "n")
    assert not bench.kernel.traces
    bench.close()


def test_models_without_settings_of_their_own_share_a_sampler(bench: Bench) -> None:
    bench.settings.update({"trace_rate": ["2"]})
    assert bench.traced("m", "n", "n", "m") == [False, True, False, True]
    bench.settings.update({"trace_rate": ["1"]}, "n")
    assert bench.traced("m", "n", "n", "m") == [False, True, True, True]


def test_a_model_can_be_left_out(bench: Bench) -> None:
    bench.settings.update({"trace_level": ["OFF"]}, "n")
    assert bench.traced("m", "n") == [True, False]


def test_a_count_is_used_up_and_shown(bench: Bench) -> None:
    bench.settings.update({"trace_count": ["2"]})
    assert bench.traced("m", "n", "m") == [True, True, False]
    assert bench.settings.get().trace_count == 0
    bench.settings.update({"trace_count": ["1"]})
    assert bench.traced("m", "m") == [True, False]


def test_tracing_stops_when_nothing_can_be_written_until_the_settings_change(bench: Bench) -> None:
    bench.kernel.tracer.stop()
    assert bench.traced("m") == [False]
    assert not bench.kernel.traces
    bench.settings.update({"trace_rate": ["1"]})
    assert bench.traced("m") == [True]


def test_the_settings_show_that_tracing_has_stopped_by_a_count_of_zero(bench: Bench) -> None:
    bench.settings.update({"trace_count": ["5"]})
    bench.settings.update({"trace_count": ["7"]}, "n")
    assert bench.traced("m", "n") == [True, True]
    bench.kernel.tracer.stop()
    assert (bench.settings.get().trace_count, bench.settings.get("n").trace_count) == (0, 0)
    # All go on with a change of any of them, and with what had remained of their counts.
    bench.settings.update({"trace_rate": ["1"]}, "n")
    assert (bench.settings.get().trace_count, bench.settings.get("n").trace_count) == (4, 6)
    assert bench.traced("m", "n") == [True, True]


@pytest.mark.parametrize("rate", [1, 2, 65, 66, 67, 200])
def test_each_nth_request_is_traced_though_nobody_looks_at_most_of_the_others(rate: int) -> None:
    bench = Bench(TraceValues(("TIMESTAMPS",), trace_rate=rate, trace_file="/t"))
    looks: list[bool] = []

    def traced() -> bool:
        looks.append(bench.kernel.tracer.passing == 0)
        return bench.traced("m") == [True]

    assert [number for number in range(1, 3 * rate + 1) if traced()] == [rate, 2 * rate, 3 * rate]
    assert sum(looks) <= 3 * 67, "as many as may be on their way before one that is traced, and some more"
    bench.close()


def test_requests_that_only_explain_themselves_and_children_change_nothing_about_the_nth() -> None:
    bench = Bench(TraceValues(("TIMESTAMPS",), trace_rate=200, trace_file="/t"))
    parent = bench.submit()
    for _ in range(100):
        explained = bench.submit(explain=True)
        assert explained.trace is not None
        assert explained.trace.output is None
        assert bench.submit("n", RecordingSink(), parent=parent, trace_parent=parent).trace is None
    assert bench.traced(*["m"] * 99) == [False] * 98 + [True]
    bench.close()


@pytest.mark.parametrize("change", ["settings of a model", "a recorder"])
def test_requests_that_have_passed_count_when_each_is_looked_at_again(change: str) -> None:
    bench = Bench(TraceValues(("TIMESTAMPS",), trace_rate=200, trace_file="/t"))
    assert not any(bench.traced(*["m"] * 100))
    assert bench.kernel.tracer.passing
    if change == "a recorder":
        bench.kernel.record_by(RecordsNothing())
    else:
        bench.settings.update({"trace_level": ["TIMESTAMPS"], "trace_rate": ["1000"]}, "n")
    assert not bench.kernel.tracer.passing
    assert bench.traced(*["m"] * 100) == [False] * 99 + [True]
    assert not any(bench.traced(*["m"] * 199))
    assert not bench.kernel.tracer.passing
    bench.close()


# ---- OpenTelemetry -------------------------------------------------------------------------


def exporting(rate: int, traceparent: str = "", state: str = "") -> tuple[Bench, Request]:
    bench = Bench(TraceValues(("TIMESTAMPS",), trace_rate=rate, trace_mode="opentelemetry"))
    sink = Door()
    sink.headers = {"traceparent": traceparent, "tracestate": state}
    return bench, bench.submit(sink=sink)


def test_a_client_that_records_a_trace_is_traced_at_any_rate_and_its_trace_goes_on() -> None:
    bench, request = exporting(0, CALLER + "01", "a=b")
    spans = trace_of(request).spans
    assert spans is not None
    assert (spans.trace_id, spans.parent, spans.state) == (CALLER[3:35], CALLER[36:52], "a=b")
    assert trace_of(request).traceparent == f"00-{spans.trace_id}-{spans.compute}-01"
    bench.close()


@pytest.mark.parametrize("traceparent", ["", CALLER + "00", "nonsense"])
def test_others_are_traced_at_the_rate(traceparent: str) -> None:
    bench, request = exporting(0, traceparent)
    assert request.trace is None
    bench.close()
    bench, request = exporting(1, traceparent)
    assert request.trace is not None
    bench.close()


def test_children_are_parts_of_the_span_of_the_model_that_caused_them() -> None:
    bench, parent = exporting(1)
    child = bench.submit("n", RecordingSink(), parent=parent, trace_parent=parent)
    outer, inner = trace_of(parent).spans, trace_of(child).spans
    assert outer is not None
    assert inner is not None
    assert (inner.trace_id, inner.parent) == (outer.trace_id, outer.model)
    assert len({outer.root, outer.model, outer.compute, inner.model, inner.compute}) == 5
    bench.close()


# ---- explanations --------------------------------------------------------------------------


def test_an_explained_request_gets_its_way_in_the_parameters_of_its_response() -> None:
    bench = Bench(TraceValues())
    sink = RecordingSink()
    request = bench.submit(sink=sink, explain=True)
    start_ns = request.queue_start_ns + 7
    trace_of(request).executing += 1
    requests = [Request("m", [], RecordingSink(), batch_size=rows) for rows in (1, 3)]
    trace_of(request).execution = TracedExecution(
        times_from(start_ns), Batch([*requests], closed_by="full"), "m_0", 1, 5000, 4, 2
    )
    trace_of(request).executed(times_from(start_ns))
    request.respond(Response("m", "1", "r", outputs=[], parameters={"own": 1}))
    found = sink.responses[0].parameters
    assert found is not None
    assert found.pop("naiad_total_ns") == 0, "the clock stands still"
    assert found == {
        "own": 1, "naiad_queue_ns": 7, "naiad_compute_input_ns": 1, "naiad_compute_infer_ns": 1,
        "naiad_compute_output_ns": 1, "naiad_instance": "m_0", "naiad_batch_size": 4, "naiad_batch_requests": 2,
        "naiad_batch_closed_by": "full", "naiad_copies": 1, "naiad_copied_bytes": 5000,
    }  # fmt: skip
    assert bench.written.records == []
    bench.close()


def test_a_request_that_is_traced_and_explained_names_its_trace(bench: Bench) -> None:
    sink = Door()
    answer(bench.submit(sink=sink, explain=True))
    found = sink.responses[0].parameters
    assert found is not None
    assert found["naiad_trace_id"] == bench.written.records[0].id


def test_the_children_of_a_request_that_is_only_explained_are_not_traced() -> None:
    bench = Bench(TraceValues())
    parent = bench.submit(explain=True)
    bench.kernel.traces = True
    assert bench.submit("n", RecordingSink(), parent=parent, trace_parent=parent).trace is None
    bench.close()


def test_traces_that_have_not_ended_hold_a_limited_number_of_bytes_of_tensors(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.kernel.tracer, "_tensors", memory := TensorMemory(4000))
    bench.settings.update({"trace_level": ["TENSORS"]})

    def tensors(*names: str) -> list[TracedTensor]:
        return [TracedTensor(BACKEND_OUTPUT, name, "INT8", [1000], bytes(1000), 1000) for name in names]

    first, second = bench.submit(), bench.submit()
    trace_of(first).add_tensors(tensors("A"))
    trace_of(second).add_tensors(tensors("B", "C", "D", "E"))
    assert not memory.take(2000)
    for request in (first, second):
        answer(request)
    assert memory.take(4000), "the traces have ended"
    found = [[(each.name, len(each.data), each.cut) for each in record.tensors] for record in bench.written.records]
    assert found == [[("A", 1000, False)], [("B", 1000, False), ("C", 0, True)]]
    assert tensor_text(bench.written.records[1].tensors[1]) == (
        "", "1000 bytes, left out with later tensors: too many bytes of tensors are traced",
    )  # fmt: skip


def test_the_tensors_of_one_trace_are_limited_so_that_they_are_encoded_in_a_short_time(bench: Bench) -> None:
    bench.settings.update({"trace_level": ["TENSORS"]})
    request = bench.submit()
    for _ in range(1000):
        trace_of(request).add_tensors([TracedTensor(BACKEND_OUTPUT, "OUT", "INT8", [4096], bytes(4096), 4096)])
    answer(request)
    (record,) = bench.written.records
    assert 400 < len(record.tensors) < 500
    assert [each.cut for each in record.tensors] == [False] * (len(record.tensors) - 1) + [True]
