"""Traces as spans, and their way to a collector."""

from __future__ import annotations

import socket
import time

import msgspec
import pytest

from kernel.records.trace import SpanIds, TraceRecord
from kernel.records.trace_export import (
    CollectorDestination,
    ExportArguments,
    ExportResult,
    decode_export_result,
    encode_arguments,
    export_traces_task,
    missing_packages,
    spans_of,
)
from kernel.settings import TraceValues
from tests.kernel.records.collector import Collector

TRACE, CALLER, ROOT, MODEL, COMPUTE = "ab" * 16, "01" * 8, "02" * 8, "03" * 8, "04" * 8
DOOR = [("HTTP_RECV_START", 1), ("HTTP_RECV_END", 2), ("INFER_RESPONSE_COMPLETE", 20), ("HTTP_SEND_START", 21),
        ("HTTP_SEND_END", 30)]  # fmt: skip
OF_MODEL = [("REQUEST_START", 3), ("QUEUE_START", 4), ("REQUEST_END", 20)]
OF_COMPUTE = [("COMPUTE_START", 5), ("COMPUTE_INPUT_END", 6), ("COMPUTE_OUTPUT_START", 18), ("COMPUTE_END", 19)]


def record(*more: tuple[str, int], parent: str = "", error: str = "") -> TraceRecord:
    ids = SpanIds(TRACE, ROOT, MODEL, COMPUTE, parent, "a=b" if parent else "")
    times = flat([*OF_COMPUTE, *DOOR, *OF_MODEL, *more])
    return TraceRecord(7, 0, "m", 3, "r", times, error=error, spans=ids)


def flat(times: list[tuple[str, int]]) -> list[str | int]:
    return [part for each in times for part in each]


def tree(record: TraceRecord) -> list[tuple[str, str, str, int, int]]:
    return [(span.name, span.id, span.parent_id, span.start_ns, span.end_ns) for span in spans_of(record)]


def test_a_request_has_spans_for_itself_its_model_and_its_computation() -> None:
    assert tree(record(parent=CALLER)) == [
        ("InferRequest", ROOT, CALLER, 1, 30), ("m", MODEL, ROOT, 3, 20), ("compute", COMPUTE, MODEL, 5, 19),
    ]  # fmt: skip
    assert [span.events for span in spans_of(record())] == [DOOR, OF_MODEL, OF_COMPUTE]


def test_the_span_of_a_request_says_when_its_first_token_came() -> None:
    [root, _, compute] = spans_of(record(("FIRST_TOKEN", 11)))
    assert ("FIRST_TOKEN", 11) in root.events
    assert root.attributes == {"gen_ai.latency.time_to_first_token": 10e-9, "gen_ai.latency.e2e": 29e-9}
    assert compute.events == OF_COMPUTE
    assert spans_of(record())[0].attributes == {}


def test_the_span_of_a_model_has_tritons_attributes() -> None:
    assert spans_of(record())[1].attributes == {
        "triton.model_name": "m", "triton.model_version": 3, "triton.trace_id": 7, "triton.trace_parent_id": 0,
        "triton.request_id": "r",
    }  # fmt: skip


def test_a_child_has_no_span_of_a_request_and_an_ensemble_none_of_a_computation() -> None:
    child = TraceRecord(8, 7, "n", 1, "", flat(OF_MODEL), spans=SpanIds(TRACE, "", MODEL, COMPUTE, CALLER))
    assert tree(child) == [("n", MODEL, CALLER, 3, 20)]


def test_custom_activities_with_an_end_become_spans_and_others_events() -> None:
    spans = spans_of(record(("A_START", 7), ("ODD", 8), ("A_END", 9), ("B_END", 10), ("C_START", 11)))
    assert [(span.name, span.parent_id, span.start_ns, span.end_ns) for span in spans[3:]] == [("A", COMPUTE, 7, 9)]
    assert [name for name, _ in spans[2].events] == [
        "COMPUTE_START", "COMPUTE_INPUT_END", "ODD", "B_END", "C_START", "COMPUTE_OUTPUT_START", "COMPUTE_END",
    ]  # fmt: skip


def test_an_activity_that_is_nothing_but_a_suffix_is_an_event() -> None:
    spans = spans_of(record(("_START", 7), ("_END", 9)))
    assert len(spans) == 3
    assert {"_START", "_END"} <= {name for name, _ in spans[2].events}


def export(url: str, *records: TraceRecord, **resource: str) -> ExportResult:
    arguments = encode_arguments(ExportArguments(url, resource, time.time_ns() - time.monotonic_ns(), list(records)))
    steps = export_traces_task(arguments, [])
    with pytest.raises(StopIteration) as stopped:
        next(steps)
    return decode_export_result(stopped.value.value.message)


def test_spans_arrive_at_a_collector() -> None:
    pytest.importorskip("opentelemetry.sdk")
    with Collector() as collector:
        assert export(collector.url, record(parent=CALLER, error="no room"), team="vision") == ExportResult()
        root, model, compute = collector.wait(3)
    assert (root.name, root.trace_id, root.id, root.parent_id, root.state) == (
        "InferRequest",
        TRACE,
        ROOT,
        CALLER,
        "a=b",
    )
    assert (root.error, model.error, compute.error) == ("no room", "no room", "")
    assert root.events == [name for name, _ in DOOR]
    assert model.attributes["triton.model_version"] == 3
    assert compute.end_ns - compute.start_ns == 14
    assert abs(root.start_ns - time.time_ns() + time.monotonic_ns()) < 10**9, "times are those of the wall clock"
    assert root.resource["service.name"] == "triton-inference-server"
    assert root.resource["team"] == "vision"


def test_a_collector_that_refuses_is_an_error_with_its_reason() -> None:
    pytest.importorskip("opentelemetry.sdk")
    with Collector(status=400) as collector:
        refused = export(collector.url, record(), record())
    assert refused.lost == 2
    assert "400" in refused.error


def test_a_collector_that_is_down_is_an_error_with_the_cause_of_the_first_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")
    with socket.socket() as unused:  # nothing listens at its port
        unused.bind(("127.0.0.1", 0))
        down = export(f"127.0.0.1:{unused.getsockname()[1]}/v1/traces", record())
    assert down.lost == 1
    assert "Connection refused" in down.error


def test_the_settings_of_batches_count_spans() -> None:
    values = TraceValues(trace_mode="opentelemetry", exporter=(
        ("bsp_schedule_delay", ("250",)), ("bsp_max_queue_size", ("30",)), ("bsp_max_export_batch_size", ("2",)),
    ))  # fmt: skip
    found = CollectorDestination(values)
    assert (found.delay_s, found.max_waiting, found.batch) == (0.25, 10, 1)
    no_delay = TraceValues(trace_mode="opentelemetry", exporter=(("bsp_schedule_delay", ("0",)),))
    assert CollectorDestination(no_delay).delay_s == 0.001
    usual = CollectorDestination(TraceValues(trace_mode="opentelemetry"))
    assert (usual.delay_s, usual.max_waiting, usual.batch) == (5, 682, 170)


def test_the_log_line_of_a_full_queue_is_the_one_that_people_search_for() -> None:
    destination = CollectorDestination(TraceValues(trace_mode="opentelemetry"))
    assert destination.full.startswith("BatchSpanProcessor queue is full - dropping span.")


def test_traces_that_a_collector_did_not_take_are_lost_and_tracing_goes_on() -> None:
    values = TraceValues(trace_mode="opentelemetry", exporter=(("url", ("c:4318/v1/traces",)),))
    destination = CollectorDestination(values)
    outcome = destination.done(msgspec.msgpack.encode(ExportResult(3, "it is down")))
    assert (outcome.lost, outcome.stops) == (3, False)
    assert outcome.problem == "the collector at 'c:4318/v1/traces' did not take them: it is down"
    usual = CollectorDestination(TraceValues(trace_mode="opentelemetry"))
    problem = usual.done(msgspec.msgpack.encode(ExportResult(1, "no"))).problem
    assert problem == ("the collector of OTEL_EXPORTER_OTLP_ENDPOINT, or else at localhost:4318, did not take them: no")
    assert destination.done(msgspec.msgpack.encode(ExportResult())).lost == 0


def test_packages_that_are_missing_are_named() -> None:
    pytest.importorskip("opentelemetry.sdk")
    assert missing_packages() == ""
