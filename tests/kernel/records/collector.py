"""A receiver of OTLP/HTTP for tests: keeps the spans that it gets."""

from __future__ import annotations

import gzip
import http.server
import threading
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from types import TracebackType


class ReceivedSpan(msgspec.Struct):
    """A span as it came; ids in hexadecimal digits, times in nanoseconds since the epoch."""

    name: str
    trace_id: str
    id: str
    parent_id: str
    start_ns: int
    end_ns: int
    events: list[str]
    attributes: dict[str, Any]
    resource: dict[str, Any]
    state: str
    error: str


class Collector:
    """Listens on a free port of 127.0.0.1 while the `with` block lasts. `status` is what it responds."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.spans: list[ReceivedSpan] = []
        self.arrived = threading.Condition()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                if collector.status == 200:
                    collector.take(self.path, body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait(self, count: int) -> list[ReceivedSpan]:
        """Return the spans, of which there are at least `count`."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.spans) >= count, 60), [span.name for span in self.spans]
        return self.spans

    def take(self, path: str, body: bytes) -> None:
        """Keep the spans of a request."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        found: list[ReceivedSpan] = []
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(group.resource.attributes)
            for spans in group.scope_spans:
                found += (_received(span, resource) for span in spans.spans)
        with self.arrived:
            self.spans += found
            self.arrived.notify_all()


def _received(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano,
        span.end_time_unix_nano, [event.name for event in span.events], _attributes(span.attributes), resource,
        span.trace_state, span.status.message,
    )  # fmt: skip


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
