"""`naiad trace`: summarizes trace files, ours and Triton's.

From the top: what the files say of each request, and which request has caused which; how long the stages of requests
took, by model, version and protocol; the pictures: a waterfall in SVG, and the events of the Perfetto viewer; the
command. Stages are as in Triton's trace_summary.py, in which `overhead` is what no other stage of its group
explains. All but the command is pure.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from kernel.errors import BadOption
from kernel.tools.printing import table_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

Event = tuple[str, int]


class ReadTrace(msgspec.Struct, eq=False):
    """One trace; times in monotonic nanoseconds of the server."""

    id: int
    model_name: str = ""
    model_version: int = 0
    request_id: str = ""
    parent_id: int = 0
    error: str = ""
    #: In the order of time.
    events: list[Event] = []
    #: Activity, and name, data, shape and dtype of the tensor.
    tensors: list[tuple[str, dict[str, Any]]] = []
    children: list[ReadTrace] = []

    @property
    def title(self) -> str:
        """Model and version, for people."""
        return f"{self.model_name}:{self.model_version}"

    @property
    def protocol(self) -> str:
        """`HTTP`, `gRPC`, or empty for a trace that no front door has begun."""
        for name, _ in self.events:
            if name.startswith("HTTP_"):
                return "HTTP"
            if name.startswith("GRPC_"):
                return "gRPC"
        return ""

    def first(self, name: str) -> int | None:
        """Return when `name` was for the first time; None if never."""
        return next((at_ns for found, at_ns in self.events if found == name), None)

    def last(self, name: str) -> int | None:
        """Return when `name` was for the last time; None if never."""
        return next((at_ns for found, at_ns in reversed(self.events) if found == name), None)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ReadTrace]]:
        """Return this trace and all that it has caused, with their depths, in the order in which they began."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def read_traces(title: str, data: bytes) -> list[ReadTrace]:
    """Return the traces in a file that no other trace in it has caused. Raises `BadOption` for a file without traces.

    `title` names the file in errors.
    """
    try:
        objects = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = " (Triton writes quotes in text tensors unescaped)" if b'"TENSOR_' in data else ""
        raise BadOption(f"{title} is not JSON: {error}{hint}") from None
    if not isinstance(objects, list):
        raise BadOption(f"{title} has no traces: expected a JSON list")
    found: dict[int, ReadTrace] = {}
    for each in objects:
        if not isinstance(each, dict) or not isinstance(each.get("id"), int):
            raise BadOption(f"{title} has no traces: expected objects with an id")
        trace = found.get(each["id"])
        if trace is None:
            trace = found[each["id"]] = ReadTrace(each["id"], events=[], tensors=[], children=[])
        try:
            _add(trace, each)
        except (KeyError, TypeError, ValueError):
            raise BadOption(f"{title} has an object that is not a trace, with id {each['id']}") from None
    return _as_trees(found.values())


def _add(trace: ReadTrace, entry: dict[str, Any]) -> None:
    if "model_name" in entry:
        trace.model_name, trace.model_version = str(entry["model_name"]), int(entry["model_version"])
        trace.request_id = str(entry.get("request_id", ""))
        trace.parent_id = int(entry.get("parent_id", 0))
        trace.error = str(entry.get("error", ""))
    for each in entry.get("timestamps", ()):
        trace.events.append((str(each["name"]), int(each["ns"])))
    if "tensor" in entry:
        trace.tensors.append((str(entry["activity"]), dict(entry["tensor"])))


def _as_trees(traces: Iterable[ReadTrace]) -> list[ReadTrace]:
    by_id = {trace.id: trace for trace in traces if trace.events}
    children: defaultdict[int, list[ReadTrace]] = defaultdict(list)
    for trace in by_id.values():
        trace.events.sort(key=itemgetter(1))
        # A parent that is missing, because its file is another one, leaves its children on their own.
        children[trace.parent_id if trace.parent_id in by_id and trace.parent_id != trace.id else 0].append(trace)
    for each in children.values():
        each.sort(key=lambda trace: (trace.events[0][1], trace.id))
    for trace in by_id.values():
        trace.children = children.get(trace.id, [])
    return children[0]


#: Stage, how deep it is inside others, and from which to which activity it takes.
_STAGES = (
    ("receive", 1, (("HTTP_RECV_START", "HTTP_RECV_END"), ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"))),
    ("handler", 1, (("REQUEST_START", "REQUEST_END"),)),
    ("queue", 2, (("QUEUE_START", "COMPUTE_START"),)),
    ("compute", 2, (("COMPUTE_START", "COMPUTE_END"),)),
    ("compute input", 3, (("COMPUTE_START", "COMPUTE_INPUT_END"),)),
    ("compute infer", 3, (("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),)),
    ("compute output", 3, (("COMPUTE_OUTPUT_START", "COMPUTE_END"),)),
    ("send", 1, (("HTTP_SEND_START", "HTTP_SEND_END"), ("GRPC_SEND_START", "GRPC_SEND_END"))),
)

#: The order and depth of all stages.
STAGES = (
    ("request", 0), ("receive", 1), ("handler", 1), ("handler overhead", 2), ("queue", 2), ("compute", 2),
    ("compute input", 3), ("compute infer", 3), ("compute output", 3), ("send", 1), ("overhead", 1),
)  # fmt: skip

PERCENTILES = (50, 90, 99)


class StageDurations(msgspec.Struct, frozen=True):
    """A stage of some requests; durations in nanoseconds."""

    stage: str
    count: int
    mean: float
    p50: int
    p90: int
    p99: int
    max: int


class ModelTimes(msgspec.Struct, frozen=True):
    """The requests to a model version over a protocol; an empty protocol for those that other requests have caused."""

    model: str
    version: int
    protocol: str
    count: int
    failed: int
    stages: list[StageDurations]


def durations_of(trace: ReadTrace) -> dict[str, int]:
    """Return the durations of the stages of a trace, in nanoseconds; a stage that it does not have is missing."""
    found: dict[str, int] = {}
    for stage, _, names in _STAGES:
        for begin, end in names:
            begin_ns, end_ns = trace.first(begin), trace.last(end)
            if begin_ns is not None and end_ns is not None and end_ns >= begin_ns:
                found[stage] = end_ns - begin_ns
    # Triton begins to wait for a message before its client has sent it.
    over_http = trace.protocol == "HTTP"
    begin_ns = trace.first("HTTP_RECV_START" if over_http else "GRPC_WAITREAD_END")
    end_ns = trace.last("HTTP_SEND_END" if over_http else "GRPC_SEND_END")
    if begin_ns is not None and end_ns is not None:
        found["request"] = end_ns - begin_ns
        known = found.get("handler", 0) + found.get("send", 0)
        known += found.get("receive", 0) if over_http else 0
        found["overhead"] = max(0, found["request"] - known)
    if "handler" in found:
        found["handler overhead"] = max(0, found["handler"] - found.get("queue", 0) - found.get("compute", 0))
    return found


def summarize(traces: Iterable[ReadTrace]) -> list[ModelTimes]:
    """Return the durations of all traces, also of those that others have caused, sorted by model."""
    groups: defaultdict[tuple[str, int, str], list[ReadTrace]] = defaultdict(list)
    for root in traces:
        for _, trace in root.walk():
            groups[trace.model_name, trace.model_version, trace.protocol].append(trace)
    return [
        ModelTimes(*key, len(group), sum(bool(trace.error) for trace in group), _stages(group))
        for key, group in sorted(groups.items())
    ]


def _stages(group: list[ReadTrace]) -> list[StageDurations]:
    all_durations = [durations_of(trace) for trace in group]
    rows: list[StageDurations] = []
    for stage, _ in STAGES:
        found = sorted(durations[stage] for durations in all_durations if stage in durations)
        if found:
            p50, p90, p99 = (_percentile(found, each) for each in PERCENTILES)
            rows.append(StageDurations(stage, len(found), sum(found) / len(found), p50, p90, p99, found[-1]))
    return rows


def _percentile(ordered: list[int], percentile: int) -> int:
    """Return the least value that is not exceeded by `percentile` percent of all values."""
    return ordered[max(0, -(-len(ordered) * percentile // 100) - 1)]


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


#: The most characters of a tensor's data in a line.
_MOST_DATA = 200

_DEPTHS = dict(STAGES)


def print_traces(
    files: Sequence[Path], *, as_json: bool, each: bool, svg_file: Path | None, perfetto_file: Path | None
) -> int:
    """Print a summary of trace files, and write pictures of them. Returns the exit code. Raises `BadOption`.

    With `each`, every trace is printed as well.
    """
    traces: list[ReadTrace] = []
    for path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadOption(f"'{path}' cannot be read: {error.strerror}") from None
        traces += read_traces(f"'{path}'", data)
    if not traces:
        raise BadOption("there are no traces in " + ", ".join(f"'{path}'" for path in files))
    if svg_file is not None:
        _write(svg_file, svg(traces).encode())
    if perfetto_file is not None:
        _write(perfetto_file, msgspec.json.encode(perfetto(traces)))
    if as_json:
        document: dict[str, Any] = {"models": summarize(traces)}
        if each:
            document["traces"] = [_as_json(trace) for trace in traces]
        typer.echo(msgspec.json.encode(document).decode())
        return 0
    if each:
        for line in _lines(traces):
            typer.echo(line)
    typer.echo(_tables(traces), nl=False)
    return 0


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise BadOption(f"'{path}' cannot be written: {error.strerror}") from None


def _tables(traces: Iterable[ReadTrace]) -> str:
    parts: list[str] = []
    for model in summarize(traces):
        origin = f"over {model.protocol}" if model.protocol else "caused by other requests"
        failed = f", {model.failed} failed" if model.failed else ""
        parts.append(f"{model.model}, version {model.version}: {model.count} traces {origin}{failed}\n")
        rows = [
            (
                "  " * _DEPTHS[row.stage] + row.stage,
                *(f"{ns / 1000:.1f}" for ns in (row.mean, row.p50, row.p90, row.p99, row.max)),
            )
            for row in model.stages
        ]
        parts.append(table_text(("Stage, in µs", "mean", "p50", "p90", "p99", "max"), rows))
        parts.append("\n")
    return "".join(parts)


def _lines(traces: Iterable[ReadTrace]) -> Iterable[str]:
    """Return each trace as lines: activities with the time since the one before, and tensors."""
    for root in traces:
        for depth, trace in root.walk():
            indent = "  " * depth
            id = f" request {trace.request_id}" if trace.request_id else ""
            yield f"{indent}trace {trace.id}: {trace.title}{id}{f' failed: {trace.error}' if trace.error else ''}"
            before_ns = trace.events[0][1]
            for name, at_ns in trace.events:
                yield f"{indent}  {(at_ns - before_ns) / 1000:10.1f} µs  {name}"
                before_ns = at_ns
            for activity, tensor in trace.tensors:
                data = str(tensor.get("data", ""))
                shown = data if len(data) <= _MOST_DATA else f"{data[:_MOST_DATA]}…"
                note = f" ({tensor['note']})" if "note" in tensor else ""
                kind = f"{tensor.get('dtype')} [{tensor.get('shape')}]"
                yield f"{indent}  {activity} {tensor.get('name')}: {kind} {shown}{note}"
        yield ""


def _as_json(trace: ReadTrace) -> dict[str, Any]:
    return {
        "id": trace.id, "model": trace.model_name, "version": trace.model_version, "request_id": trace.request_id,
        "error": trace.error, "events": [{"name": name, "ns": ns} for name, ns in trace.events],
        "tensors": [{"activity": activity, **tensor} for activity, tensor in trace.tensors],
        "children": [_as_json(child) for child in trace.children],
    }  # fmt: skip
