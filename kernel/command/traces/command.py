"""`naiad trace`: summarizes trace files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import typer

from kernel.command.start_messages import table_text
from kernel.command.traces.reading import read_traces
from kernel.command.traces.summary import STAGES, summarize
from kernel.command.traces.waterfall import perfetto, svg
from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kernel.command.traces.reading import ReadTrace

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
