"""What `naiad tune` has measured: rows, the table, and the best one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.command.bench.report.results import PointRow  # noqa: TC001 - msgspec reads the annotation
from kernel.command.bench.report.table import aligned, duration
from kernel.command.tune.search import TuneCandidate  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Sequence


class LatencyGoal(msgspec.Struct, frozen=True):
    """The latency that must not be exceeded."""

    #: Milliseconds; 0 for none.
    ms: float
    #: As in `PointRow`, such as "99".
    percent: str

    def met_by(self, row: PointRow) -> bool:
        """Return whether a load has met it, without a failure."""
        return bool(row.completed) and not row.failed and (not self.ms or self.of(row) <= self.ms * 1e3)

    def of(self, row: PointRow) -> float:
        """Return the latency that is compared, in microseconds."""
        return row.latency.percentiles[self.percent]

    def text(self) -> str:
        """Return it in words."""
        return f"p{self.percent} of at most {self.ms:g} ms" if self.ms else "no latency goal"


def load_problem(error: str) -> str:
    """Return the reason of a load that has failed, in one line, from the error that the server has returned."""
    first = next((line for line in error.splitlines() if line.strip()), "")
    return first.rpartition("is at UNAVAILABLE state: ")[2]


class TuneRow(msgspec.Struct, frozen=True):
    """A configuration and its loads; `problem` says in one line why it cannot be served."""

    candidate: TuneCandidate
    loads: list[PointRow]
    problem: str = ""

    def best(self, goal: LatencyGoal) -> PointRow | None:
        """Return the load with the highest rate within the goal; None if none is within it."""
        return max((row for row in self.loads if goal.met_by(row)), key=lambda row: row.rate, default=None)


def goes_on(loads: Sequence[PointRow], goal: LatencyGoal) -> bool:
    """Return whether more requests in flight could bring a higher rate within the goal."""
    if any(row.failed for row in loads):
        return False
    # Twice in a row too slow: once may be a disturbance.
    if len(loads) > 1 and not goal.met_by(loads[-1]) and not goal.met_by(loads[-2]):
        return False
    # Twice in a row no more responses: the model is busy, and more requests only wait.
    return len(loads) < 3 or loads[-1].rate > 1.03 * min(loads[-2].rate, loads[-3].rate)


def table_of(rows: Sequence[TuneRow], goal: LatencyGoal, best: TuneCandidate | None) -> str:
    """Return the table: the loads with the highest rates within the goal."""
    lines = [["", "instances", "max batch", "delay", "requests/s", "in flight", f"p{goal.percent}", "batch", ""]]
    for row in rows:
        found = row.best(goal)
        delay = "off" if row.candidate.delay_us is None else f"{row.candidate.delay_us} us"
        settings = [str(row.candidate.instances), str(row.candidate.max_batch_size or "none"), delay]
        mark = "best" if row.candidate == best else ""
        if found is None:
            why = row.problem or (f"no load has {goal.text()}" if row.loads else "not measured")
            lines.append([mark, *settings, "-", "-", "-", "-", why[:80]])
            continue
        batch = f"{found.server.mean_batch:.1f}" if found.server is not None else ""
        lines.append(
            [mark, *settings, f"{found.rate:,.0f}", str(found.connections), duration(goal.of(found)), batch, ""]
        )
    return aligned(lines)
