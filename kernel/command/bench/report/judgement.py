"""What a reader of the figures must know: where the client is the limit, or a row says less than it seems. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.command.bench.report.results import UNSTABLE

if TYPE_CHECKING:
    from kernel.command.bench.report.results import PointRow

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
            "server does not keep up, and the latencies are those of a queue that grows"
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
