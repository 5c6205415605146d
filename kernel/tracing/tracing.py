"""Traces of a server as a whole: starts the helper that writes them, chooses where they go, and ends both.

Nothing of this exists while tracing is off: the helper is started for the first trace that has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernel.errors import Unsupported
from kernel.serving.front_doors.server_parts import ServerPart, TraceFigures
from kernel.serving.helper_tasks import Helpers

if TYPE_CHECKING:
    from kernel.settings import TraceValues
    from kernel.tracing.output.export import CollectorDestination
    from kernel.tracing.output.writer import TraceWriter
    from kernel.tracing.trace import TraceOutput
    from kernel.tracing.tracer import Tracer

#: How long the last traces may take to be written when the server stops, in seconds.
CLOSE_TIMEOUT_S = 5.0


class TraceHelpers(Helpers, Protocol):
    """Helpers that do nothing but write traces."""

    async def close(self) -> None:
        """Stop the helpers. Tasks that wait or run fail."""


class Tracing(ServerPart):
    """Traces of one server, of which it is a part."""

    def __init__(self, tracer: Tracer, helpers: TraceHelpers, startup: TraceValues) -> None:
        """`helpers` have no other tasks: a full disk or a collector that hangs delays none. `close` closes them.

        Raises `Unsupported` if the settings at the start need packages that are not installed.
        """
        if startup.trace_mode == "opentelemetry":
            from kernel.tracing.output.export import missing_packages  # most servers trace nothing

            if missing := missing_packages():
                raise Unsupported(missing)
        self._tracer = tracer
        self._helpers = helpers
        self._writer: TraceWriter | None = None
        self._collector: CollectorDestination | None = None

    async def start(self) -> None:
        """Trace from now on."""
        self._tracer.start(self._output_for)

    def figures(self) -> TraceFigures:
        return (
            TraceFigures()
            if self._writer is None
            else TraceFigures(self._writer.written_count, self._writer.lost_count)
        )

    def _output_for(self, values: TraceValues) -> TraceOutput:
        from kernel.tracing.output.writer import CollectorOutput, TraceWriter  # as above

        if self._writer is None:
            self._writer = TraceWriter(self._helpers, self._tracer.stop)
        if values.trace_mode == "triton":
            return self._writer.file_output(values)
        if self._collector is None:
            from kernel.tracing.output.export import CollectorDestination  # as above

            self._collector = CollectorDestination(values)  # its settings stay those of the start
        return CollectorOutput(self._writer, self._collector)

    async def close(self) -> None:
        """Write what waits, and end the helpers."""
        if self._writer is not None:
            await self._writer.close(CLOSE_TIMEOUT_S)
        await self._helpers.close()
