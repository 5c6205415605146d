"""Where traces go in mode `opentelemetry`: to a collector, by a helper. Settings have the names of --trace-config."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING

from kernel.texts import install_command
from kernel.tracing.output.destinations import WriteOutcome
from kernel.tracing.output.export_task import EXPORT_TRACES, decode_export_result, encode_arguments

if TYPE_CHECKING:
    from kernel.settings import TraceValues

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
    """A collector. Implements `kernel.tracing.output.destinations.Destination`."""

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
