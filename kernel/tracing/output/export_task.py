"""The task of the helper that exports traces to a collector, by OpenTelemetry's SDK and its exporter for OTLP/HTTP."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.serving.helper_tasks import TaskResult
from kernel.tracing.output.spans import spans_of
from kernel.tracing.trace import TraceRecord  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from kernel.tracing.output.spans import TraceSpan

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
