"""The rows of `naiad bench` as a table, as CSV, and side by side for two servers or runs. Pure.

What a reader of the figures must know: where the client is the limit, or a row says less than it seems. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.tools.bench.results import UNSTABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.tools.bench.results import BenchRun, LatencyFigures, PointRow

#: A load process that is busier than this may be slower than the server.
BUSY = 0.8

#: Below this the client's own time is a part of the latency that cannot be left out.
SHORT_US = 1000.0

#: So late may one in a hundred requests of an open loop be, as a part of the highest percentile of the latency.
LATE = 0.1

#: The 99th percentile of fewer responses is hardly more than the slowest one.
_FEW = 100

#: The rate of an open loop is reached if no more than this is missing.
_REACHED = 0.97


def level_name(row: PointRow) -> str:
    """Return how notes name a load."""
    return f"{row.target_rate:g} requests/s" if row.target_rate else f"{row.connections} in flight"


def row_notes(row: PointRow) -> list[str]:
    """Return the sentences about a load, the most important first; none for a load that needs no explanation."""
    found = []
    if row.errors:
        text, count = next(iter(row.errors.items()))
        more = f", and {len(row.errors) - 1} other kinds of errors" if len(row.errors) > 1 else ""
        found.append(f"{row.failed} requests failed: {count} times '{text}'{more}")
    if not row.completed:
        found.append("no request was completed within the time that counts: take a longer --duration")
    if row.unsent:
        found.append(
            f"{row.unsent} requests were due and never sent, since all {row.connections} connections were busy: the "
            "server does not keep up, and the latencies come from a queue that grows"
        )
    elif row.target_rate and row.completed and row.rate < _REACHED * row.target_rate and not row.stopped:
        found.append(f"only {row.rate:,.0f} of {row.target_rate:,.0f} requests/s were completed in time")
    found += _client_notes(row)
    if row.variation > UNSTABLE and not row.errors:
        found.append(
            f"the seconds of the measurement differ by {100 * row.variation:.0f} %: measure again, or with a longer "
            "--duration"
        )
    if 0 < row.completed < _FEW:
        found.append(f"only {row.completed} requests were completed: high percentiles say little")
    return found


def _client_notes(row: PointRow) -> list[str]:
    if row.client.busy > BUSY:
        return [
            f"the client is the limit: a load process was busy for {100 * row.client.busy:.0f} % of the time, so the "
            "server may be faster; use more --processes, or another machine"
        ]
    slow = max(row.latency.percentiles.values(), default=row.latency.mean_us)
    if row.target_rate and row.client.late_us > LATE * slow and slow and not row.unsent:
        return [
            f"the client was late: 1 % of the requests were sent {row.client.late_us / 1e3:.2f} ms or more after they "
            "were due, though a connection was free; these latencies contain that time"
        ]
    return []


def short_note(rows: list[PointRow]) -> str:
    """Return the sentence about latencies so short that the client is a part of them, or nothing."""
    short = [row for row in rows if row.completed and row.latency.mean_us < SHORT_US]
    if not short:
        return ""
    lowest, highest = (pick(row.client.cpu_us for row in short) for pick in (min, max))
    span = f"{lowest:.0f}" if round(lowest) == round(highest) else f"{lowest:.0f} to {highest:.0f}"
    return (
        f"below 1 ms the client counts: of its own it took {span} us of processor time for a request, which are in "
        "these latencies, and on the server's machine also missing there"
    )


def duration(us: float) -> str:
    """Return a time with three digits: in microseconds, milliseconds or seconds."""
    if us < 999.5:
        return f"{us:.0f} us"
    if us < 999_500:
        return f"{us / 1e3:.{2 if us < 9995 else 1 if us < 99950 else 0}f} ms"
    return f"{us / 1e6:.{2 if us < 9.995e6 else 1}f} s"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with columns that end at the same place; the first row has the titles."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)


def titles(run: BenchRun) -> list[str]:
    """Return the titles of the columns that the rows of a run have."""
    rows = run.points
    found = ["rate" if any(row.target_rate for row in rows) else "in flight", "requests/s", "errors", "mean"]
    found += [f"p{percent}" for percent in rows[0].latency.percentiles]
    if any(row.first_response for row in rows):
        found += ["first", "gap", "responses/s"]
    if any(row.server for row in rows):
        found += ["queue", "input", "compute", "output", "batch"]
    return [*found, "client"]


def cells(row: PointRow, columns: Sequence[str]) -> list[str]:
    """Return the cells of a row for `titles`."""
    found = {
        "rate": f"{row.target_rate:,g}",
        "in flight": str(row.connections),
        "requests/s": f"{row.rate:,.0f}" if row.rate >= 100 else f"{row.rate:.1f}",
        "errors": str(row.failed + row.unsent),
        "mean": duration(row.latency.mean_us),
        "client": duration(row.client.cpu_us),
        **{f"p{percent}": duration(value) for percent, value in row.latency.percentiles.items()},
    }
    if row.first_response is not None:
        found["first"] = _median(row.first_response)
        found["gap"] = _median(row.response_gap) if row.response_gap is not None else ""
        found["responses/s"] = f"{row.response_rate:,.0f}"
    if row.server is not None:
        found["queue"] = duration(row.server.queue_us)
        found["input"] = duration(row.server.compute_input_us)
        found["compute"] = duration(row.server.compute_infer_us)
        found["output"] = duration(row.server.compute_output_us)
        found["batch"] = f"{row.server.mean_batch:.1f}"
    return [found.get(column, "") for column in columns]


def _median(figures: LatencyFigures) -> str:
    return duration(figures.percentiles.get("50", figures.mean_us))


def run_text(run: BenchRun) -> str:
    """Return a run as text: what was measured, the table, and the notes."""
    text = f"{run.model} at {run.label} ({run.server}, {run.protocol}{run.kind})\n"
    if not run.points:
        return text + "nothing was measured\n"
    columns = titles(run)
    return text + aligned([columns, *(cells(row, columns) for row in run.points)]) + notes_text(run)


def notes_text(run: BenchRun) -> str:
    """Return the sentences below a table, a line each."""
    lines = [f"{level_name(row)}: {note}" for row in run.points for note in row_notes(row)]
    lines += [f"{level_name(row)}: ended early by the keyboard" for row in run.points if row.stopped]
    lines += run.notes
    if short := short_note(run.points):
        lines.append(short)
    return "".join(f"{line}\n" for line in lines)


def compared_text(first: BenchRun, second: BenchRun) -> str:
    """Return two runs side by side: of each load both rows, and how many times the second is of the first."""
    names = [f"A: {first.model} at {first.label} ({first.server}, {first.protocol}{first.kind})",
             f"B: {second.model} at {second.label} ({second.server}, {second.protocol}{second.kind})"]  # fmt: skip
    text = "\n".join(names) + "\n"
    pairs = [
        (row, other)
        for row in first.points
        for other in second.points
        if (row.target_rate or row.connections, bool(row.target_rate))
        == (other.target_rate or other.connections, bool(other.target_rate))
    ]
    if not pairs:
        return f"{text}the two runs have no load in common\n"
    columns = titles(first) if len(titles(first)) >= len(titles(second)) else titles(second)
    rows = [["", *columns]]
    for row, other in pairs:
        rows.append(["A", *cells(row, columns)])
        rows.append(["B", *cells(other, columns)])
        rows.append(["B/A", *_ratios(row, other, columns)])
    text += aligned(rows)
    for name, run in (("A", first), ("B", second)):
        text += "".join(f"{name}, {line}\n" for line in notes_text(run).splitlines())
    return text


def _ratios(row: PointRow, other: PointRow, columns: Sequence[str]) -> list[str]:
    values = {
        "requests/s": (row.rate, other.rate),
        "mean": (row.latency.mean_us, other.latency.mean_us),
        "responses/s": (row.response_rate, other.response_rate),
        "client": (row.client.cpu_us, other.client.cpu_us),
        **{
            f"p{percent}": (value, other.latency.percentiles.get(percent, 0.0))
            for percent, value in row.latency.percentiles.items()
        },
    }
    found = []
    for column in columns:
        before, after = values.get(column, (0.0, 0.0))
        found.append(f"{after / before:.2f}" if before and after else "")
    return found


def csv_text(runs: Sequence[BenchRun]) -> str:
    """Return all rows as CSV. Columns that perf_analyzer has too have its names; times are microseconds."""
    percents = list(dict.fromkeys(each for run in runs for row in run.points for each in row.latency.percentiles))
    lines = [
        ["Server", "Concurrency", "Request Rate", "Inferences/Second", "Requests/Second", "Errors", "Server Queue",
         "Server Compute Input", "Server Compute Infer", "Server Compute Output", "Avg latency",
         *(f"p{percent} latency" for percent in percents), "Avg first response", "Responses/Second", "Client CPU"]
    ]  # fmt: skip
    for run in runs:
        for row in run.points:
            server = row.server
            lines.append([
                run.label, "" if row.target_rate else str(row.connections),
                f"{row.target_rate:g}" if row.target_rate else "", f"{row.rate * run.batch:.2f}", f"{row.rate:.2f}",
                str(row.failed + row.unsent),
                *(f"{value:.0f}" for value in (
                    (server.queue_us, server.compute_input_us, server.compute_infer_us, server.compute_output_us)
                    if server is not None else ()
                )),
                *([""] * 4 if server is None else []),
                f"{row.latency.mean_us:.0f}",
                *(f"{row.latency.percentiles[each]:.0f}" if each in row.latency.percentiles else ""
                  for each in percents),
                f"{row.first_response.mean_us:.0f}" if row.first_response else "",
                f"{row.response_rate:.2f}" if row.response_rate else "", f"{row.client.cpu_us:.1f}",
            ])  # fmt: skip
    return "".join(",".join(_csv_cell(cell) for cell in line) + "\n" for line in lines)


def _csv_cell(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"\n') else text
