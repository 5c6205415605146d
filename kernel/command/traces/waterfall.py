"""Traces as pictures: a waterfall in SVG, and the events of the Perfetto viewer. Pure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernel.command.traces.reading import ReadTrace

#: Each stage, its first and last activity, and its colour. The colours also differ in a black and white print.
_BARS = (
    ("receive", "HTTP_RECV_START", "HTTP_RECV_END", "#9ecae1"),
    ("receive", "GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "#9ecae1"),
    ("queue", "QUEUE_START", "COMPUTE_START", "#fdd0a2"),
    ("compute input", "COMPUTE_START", "COMPUTE_INPUT_END", "#a1d99b"),
    ("compute infer", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "#31a354"),
    ("compute output", "COMPUTE_OUTPUT_START", "COMPUTE_END", "#74c476"),
    ("send", "HTTP_SEND_START", "HTTP_SEND_END", "#6baed6"),
    ("send", "GRPC_SEND_START", "GRPC_SEND_END", "#6baed6"),
)

_WIDTH, _LABEL_WIDTH, _ROW, _BAR = 1000, 260, 22, 14

#: The most requests in one picture.
MOST_DRAWN = 200


class WaterfallBar(msgspec.Struct, frozen=True):
    """A stage of a trace; times in monotonic nanoseconds."""

    stage: str
    colour: str
    start_ns: int
    end_ns: int


def bars_of(trace: ReadTrace) -> Iterator[WaterfallBar]:
    """Return the stages of a trace. A stage that comes again has a bar each time."""
    for stage, begin, end, colour in _BARS:
        starts = [at_ns for name, at_ns in trace.events if name == begin]
        ends = [at_ns for name, at_ns in trace.events if name == end]
        for start_ns, end_ns in zip(starts, ends, strict=False):
            if end_ns >= start_ns:
                yield WaterfallBar(stage, colour, start_ns, end_ns)


def svg(traces: Sequence[ReadTrace]) -> str:
    """Return a waterfall of each request: a row for each of its traces, all with the time scale of their request."""
    rows: list[str] = []
    y = 30
    for root in traces[:MOST_DRAWN]:
        tree = list(root.walk())
        begin_ns = min(trace.events[0][1] for _, trace in tree)
        end_ns = max(trace.events[-1][1] for _, trace in tree)
        scale = (_WIDTH - _LABEL_WIDTH - 10) / max(1, end_ns - begin_ns)
        failed = f" failed: {root.error}" if root.error else ""
        heading = f"request {root.request_id or root.id}: {(end_ns - begin_ns) / 1000:.0f} µs{failed}"
        rows.append(f'<text class="h" x="10" y="{y}">{escape(heading)}</text>')
        y += 8
        for depth, trace in tree:
            label = "\u00a0\u00a0" * depth + trace.title
            rows.append(f'<text x="10" y="{y + _BAR - 2}">{escape(label[:40])}</text>')
            x = _LABEL_WIDTH + (trace.events[0][1] - begin_ns) * scale
            width = max(1.0, (trace.events[-1][1] - trace.events[0][1]) * scale)
            rows.append(f'<rect class="t" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"/>')
            for bar in bars_of(trace):
                x = _LABEL_WIDTH + (bar.start_ns - begin_ns) * scale
                width = max(0.5, (bar.end_ns - bar.start_ns) * scale)
                title = f"{bar.stage}: {(bar.end_ns - bar.start_ns) / 1000:.1f} µs"
                rows.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{bar.colour}">'
                    f"<title>{title}</title></rect>"
                )
            y += _ROW
        y += _ROW
    left = len(traces) - MOST_DRAWN
    if left > 0:
        rows.append(f'<text x="10" y="{y}">and {left} more requests</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 20}" width="{_WIDTH}" height="{y + 20}">'
        "<style>text{font:12px sans-serif;fill:#222}.h{font-weight:bold}.t{fill:#eee;stroke:#999;stroke-width:.5}"
        f"svg{{background:#fff}}</style>\n{_legend()}\n" + "\n".join(rows) + "\n</svg>\n"
    )


def _legend() -> str:
    parts: list[str] = []
    x = _LABEL_WIDTH
    for stage, colour in {stage: colour for stage, _, _, colour in _BARS}.items():
        parts.append(f'<rect x="{x}" y="4" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="13">{stage}</text>')
        x += 110
    return "".join(parts)


def perfetto(traces: Sequence[ReadTrace]) -> dict[str, Any]:
    """Return traces in the JSON that ui.perfetto.dev and chrome://tracing open. Times are microseconds.

    Each request of a client is a process, each of its traces a thread.
    """
    events: list[dict[str, Any]] = []
    for root in traces:
        name = f"request {root.request_id or root.id}"
        events.append({"ph": "M", "name": "process_name", "pid": root.id, "args": {"name": name}})
        for _, trace in root.walk():
            place = {"pid": root.id, "tid": trace.id}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": trace.title}})
            start_ns, end_ns = trace.events[0][1], trace.events[-1][1]
            arguments = {"request_id": trace.request_id, "error": trace.error}
            events.append(_complete(trace.title, place, start_ns, end_ns, {k: v for k, v in arguments.items() if v}))
            events += (_complete(bar.stage, place, bar.start_ns, bar.end_ns, {}) for bar in bars_of(trace))
            events += ({"ph": "i", "name": name, **place, "ts": at_ns / 1000, "s": "t"} for name, at_ns in trace.events)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _complete(
    name: str, place: dict[str, int], start_ns: int, end_ns: int, arguments: dict[str, str]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        **place,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": arguments,
    }
