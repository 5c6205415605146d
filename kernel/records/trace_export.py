"""Traces for a collector: the destination that gives them to a helper, and the helper's task that exports them.

The helper uses OpenTelemetry's SDK and its exporter for OTLP/HTTP. Names, attributes and events of spans are Triton's
(tracer.cc); settings have the names of --trace-config. A client's request is a span `InferRequest` with a span of its
model in it; where the model executes, this has a span `compute`. The models of an ensemble's steps, and those that a
model calls, have their spans in their caller's span.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.records.trace import (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    FIRST_TOKEN,
    QUEUE_START,
    REQUEST_END,
    REQUEST_START,
    RESPONSE_COMPLETE,
    TraceRecord,
)
from kernel.records.trace_files import WriteOutcome
from kernel.serving.helper_tasks import TaskResult
from kernel.texts import install_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.records.trace import SpanIds
    from kernel.serving.helper_tasks import TaskSteps
    from kernel.settings import TraceValues

_OF_MODEL = {REQUEST_START, QUEUE_START, REQUEST_END}

_OF_COMPUTE = {COMPUTE_START, COMPUTE_INPUT_END, COMPUTE_OUTPUT_START, COMPUTE_END}

_OF_FRONT_DOORS = ("HTTP_", "GRPC_")

_OF_RESPONSES = {RESPONSE_COMPLETE, FIRST_TOKEN}

#: A custom activity whose name ends so begins or ends a span of its own.
_BEGIN, _END = "_START", "_END"

Event = tuple[str, int]


class TraceSpan(msgspec.Struct):
    """One span; times in monotonic nanoseconds."""

    name: str
    #: 16 hexadecimal digits; the parent's are empty for the first span of a trace.
    id: str
    parent_id: str
    start_ns: int
    end_ns: int
    events: list[Event] = []
    attributes: dict[str, str | int | float] = {}
    error: str = ""


def spans_of(record: TraceRecord) -> list[TraceSpan]:
    """Return the spans of a trace that has ids for them, the outer ones first."""
    ids = record.spans
    assert ids is not None, "a trace without the ids of OpenTelemetry"
    times = record.pairs()
    of_model = [each for each in times if each[0] in _OF_MODEL]
    of_compute = [each for each in times if each[0] in _OF_COMPUTE]
    of_door = [each for each in times if each[0] in _OF_RESPONSES or each[0].startswith(_OF_FRONT_DOORS)]
    found = [TraceSpan(
        record.model_name, ids.model, ids.root or ids.parent, of_model[0][1], of_model[-1][1], of_model,
        _attributes(record), record.error,
    )]  # fmt: skip
    if not record.parent_id:
        found.insert(
            0,
            TraceSpan(
                "InferRequest", ids.root, ids.parent, times[0][1], times[-1][1], of_door, _of_generation(times),
                record.error,
            ),
        )  # fmt: skip
    if of_compute:
        found.append(TraceSpan("compute", ids.compute, ids.model, of_compute[0][1], of_compute[-1][1], of_compute))
    known = {*of_model, *of_compute, *of_door}
    _add_custom(found, [each for each in times if each not in known], ids)
    return found


def _of_generation(times: list[Event]) -> dict[str, str | int | float]:
    """Return what vLLM says about a generation on its span (its `SpanAttributes`), in seconds."""
    first_ns = next((at_ns for name, at_ns in times if name == FIRST_TOKEN), None)
    if first_ns is None:
        return {}
    begun_ns, ended_ns = times[0][1], times[-1][1]
    return {
        "gen_ai.latency.time_to_first_token": (first_ns - begun_ns) / 1e9,
        "gen_ai.latency.e2e": (ended_ns - begun_ns) / 1e9,
    }


def _attributes(record: TraceRecord) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        "triton.model_name": record.model_name,
        "triton.model_version": record.model_version,
        "triton.trace_id": record.id,
        "triton.trace_parent_id": record.parent_id,
    }
    if record.request_id:
        attributes["triton.request_id"] = record.request_id
    return attributes


def _add_custom(spans: list[TraceSpan], activities: list[Event], ids: SpanIds) -> None:
    """Add what a backend has reported: spans where a beginning has an end, else events of the innermost span."""
    inner = spans[-1]
    begun: dict[str, list[int]] = {}
    for name, at_ns in activities:
        base = name.removesuffix(_END)
        if name.endswith(_BEGIN) and name != _BEGIN:  # a span has a name
            begun.setdefault(name.removesuffix(_BEGIN), []).append(at_ns)
        elif base != name and begun.get(base):
            start_ns = begun[base].pop()
            id = hashlib.blake2b(f"{ids.compute} {base} {start_ns}".encode(), digest_size=8).hexdigest()
            events = [(f"{base}{_BEGIN}", start_ns), (name, at_ns)]
            spans.append(TraceSpan(base, id, inner.id, start_ns, at_ns, events))
        else:
            inner.events.append((name, at_ns))
    for base, starts in begun.items():
        inner.events += ((f"{base}{_BEGIN}", at_ns) for at_ns in starts)
    inner.events.sort(key=lambda each: each[1])


#: The name of the function.
EXPORT_TRACES = "traces.export"

#: Triton's name of the service, unless the operator gives another one.
_SERVICE = "triton-inference-server"


class ExportArguments(msgspec.Struct, array_like=True):
    """Send these traces to the collector at `url`; "" for that of the variables OTEL_*, or the usual one."""

    url: str
    resource: dict[str, str]
    #: The time since the epoch is the monotonic time plus this, in nanoseconds.
    wall_offset_ns: int
    records: list[TraceRecord]


class ExportResult(msgspec.Struct, array_like=True):
    """How many traces were lost, and why."""

    lost: int = 0
    error: str = ""


encode_arguments = msgspec.msgpack.Encoder().encode

decode_export_result = msgspec.msgpack.Decoder(ExportResult).decode

_decode_arguments = msgspec.msgpack.Decoder(ExportArguments).decode


def export_traces_task(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    """Send traces to a collector. May take as long as the exporter's timeout (OTEL_EXPORTER_OTLP_TIMEOUT)."""
    yield from ()  # a task function is a generator, and this one needs no memory
    wanted = _decode_arguments(arguments)
    error = _export(wanted)
    return TaskResult(msgspec.msgpack.encode(ExportResult(len(wanted.records) if error else 0, error)))


def _export(wanted: ExportArguments) -> str:
    """Return why the traces were not taken; empty if they were."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    resource = _resource(tuple(wanted.resource.items()))
    spans = [
        _readable(span, record, resource, wanted.wall_offset_ns)
        for record in wanted.records
        for span in spans_of(record)
    ]
    exporter, complaints = _exporter(wanted.url)
    complaints.clear()
    if exporter.export(spans) is SpanExportResult.SUCCESS:
        return ""
    return complaints.text()


class _Complaints(logging.Handler):
    """Keeps what the exporter logs: the kernel logs it, now and then."""

    _first = _last = ""

    def clear(self) -> None:
        """Forget the complaints before the next export."""
        self._first = self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self._last = record.getMessage()
        self._first = self._first or self._last

    def text(self) -> str:
        """Return the last complaint with the first: after retries only the first has the cause."""
        if self._first == self._last:
            return self._last or "no reason was given"
        return f"{self._last} The first attempt: {self._first}"


@functools.cache
def _exporter(url: str) -> tuple[Any, _Complaints]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    complaints = _Complaints()
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.handlers = [complaints]
    if not url:
        return OTLPSpanExporter(), complaints
    return OTLPSpanExporter(endpoint=url if "://" in url else f"http://{url}"), complaints


@functools.cache
def _resource(attributes: tuple[tuple[str, str], ...]) -> Any:
    from opentelemetry.sdk.resources import Resource

    given: dict[str, Any] = dict(attributes)
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        given.setdefault("service.name", _SERVICE)
    return Resource.create(given)


def _readable(span: TraceSpan, record: TraceRecord, resource: Any, offset_ns: int) -> Any:
    """Return a span as the exporter takes it."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
    from opentelemetry.trace.status import Status, StatusCode

    ids = record.spans
    assert ids is not None
    state = TraceState.from_header([ids.state]) if ids.state else TraceState()

    def context(id: str, *, remote: bool) -> SpanContext:
        return SpanContext(int(ids.trace_id, 16), int(id, 16), remote, TraceFlags(TraceFlags.SAMPLED), state)

    remote = not record.parent_id and span.id == ids.root
    return ReadableSpan(
        span.name,
        context=context(span.id, remote=False),
        parent=context(span.parent_id, remote=remote) if span.parent_id else None,
        resource=resource,
        attributes=span.attributes,
        events=[Event(name, timestamp=at_ns + offset_ns) for name, at_ns in span.events],
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=span.start_ns + offset_ns,
        end_time=span.end_ns + offset_ns,
        instrumentation_scope=InstrumentationScope("triton-server"),
    )


#: Spans of a trace: of the request, of its model, and of the computation.
_SPANS_OF_TRACE = 3

#: What has to be installed.
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def missing_packages() -> str:
    """Return what is wrong if traces cannot be exported on this installation; else an empty text."""
    try:
        if all(importlib.util.find_spec(name) is not None for name in _PACKAGES):
            return ""
    except ModuleNotFoundError:
        pass
    return (
        f"--trace-config mode=opentelemetry needs packages that are not installed: {install_command('opentelemetry')}"
    )


#: With a delay of 0, spans are exported as soon as they are there, but those of one event-loop iteration together.
_MIN_DELAY_S = 0.001


class CollectorDestination:
    """A collector. Implements `kernel.records.trace_files.Destination`."""

    task = EXPORT_TRACES
    #: A slow collector waits itself. What comes meanwhile is for the next export.
    rest_factor = 0
    #: The line of OpenTelemetry's own processor, for which logs are searched.
    full = "BatchSpanProcessor queue is full - dropping span. The setting bsp_max_queue_size makes it larger."

    def __init__(self, values: TraceValues) -> None:
        settings = dict(values.exporter)

        def number(name: str, default: int) -> int:
            return int(settings[name][-1]) if name in settings else default

        self.delay_s = max(number("bsp_schedule_delay", 5000) / 1000, _MIN_DELAY_S)
        # OpenTelemetry counts spans.
        self.batch = max(1, number("bsp_max_export_batch_size", 512) // _SPANS_OF_TRACE)
        self.max_waiting = max(1, number("bsp_max_queue_size", 2048) // _SPANS_OF_TRACE)
        self._url = settings["url"][-1] if "url" in settings else ""
        self._resource = {
            key: value for key, _, value in (text.partition("=") for text in settings.get("resource", ()))
        }

    def arguments(self) -> bytes:
        offset_ns = time.time_ns() - time.monotonic_ns()
        return encode_arguments((self._url, self._resource, offset_ns, None))[:-1]  # `ExportArguments`

    def done(self, result: bytes) -> WriteOutcome:
        exported = decode_export_result(result)
        if not exported.error:
            return WriteOutcome()
        where = f"at '{self._url}'" if self._url else "of OTEL_EXPORTER_OTLP_ENDPOINT, or else at localhost:4318,"
        return WriteOutcome(exported.lost, f"the collector {where} did not take them: {exported.error}")
