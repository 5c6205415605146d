"""Where the time went in the server: the difference of a model's statistics before and after a load. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel.command.bench.report.results import ServerTimes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


def server_times(
    before: Iterable[Mapping[str, Any]] | None, after: Iterable[Mapping[str, Any]] | None
) -> ServerTimes | None:
    """Return the difference; None where there are no statistics, or nothing has been executed in between."""
    if before is None or after is None:
        return None
    first, last = _sums(before), _sums(after)
    found = {name: last[name] - first[name] for name in last}
    count = found["queue count"]
    if count <= 0:
        return None
    queue, given, inferred, output = (max(0, found[f"{part} ns"]) / count / 1e3 for part in _PARTS)
    batch = found["inferences"] / found["executions"] if found["executions"] > 0 else 0.0
    return ServerTimes(queue, given, inferred, output, batch, count)


def _sums(statistics: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the sums over all versions."""
    found = dict.fromkeys(
        ("inferences", "executions", *(f"{part} {of}" for part in _PARTS for of in ("ns", "count"))), 0
    )
    for version in statistics:
        found["inferences"] += int(version.get("inference_count", 0))
        found["executions"] += int(version.get("execution_count", 0))
        times = version.get("inference_stats", {})
        for part in _PARTS:
            for of in ("ns", "count"):
                found[f"{part} {of}"] += int(times.get(part, {}).get(of, 0))
    return found
