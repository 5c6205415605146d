"""What a load has measured: the results of all load processes as one row, and runs as they are stored. Pure.

Where the time went in the server: the difference of a model's statistics before and after a load. Pure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.tools.bench.messages import LatencyHistogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kernel.tools.bench.messages import Latencies, PointResult

#: Of a run without errors, the seconds of a load may differ by this part of their mean before a note says so.
UNSTABLE = 0.1


class LatencyFigures(msgspec.Struct, frozen=True):
    """Latencies in microseconds; `percentiles` has their percents as text, such as "99.9"."""

    mean_us: float
    largest_us: float
    percentiles: dict[str, float]


class ClientFigures(msgspec.Struct, frozen=True):
    """What this program itself has taken."""

    #: Processor time for a request.
    cpu_us: float
    #: How busy the busiest load process was, from 0 to 1.
    busy: float
    #: Requests of an open loop that found a connection free were sent this late, at the 99th percentile.
    late_us: float = 0.0


class ServerTimes(msgspec.Struct, frozen=True):
    """Means over the requests of a load, in microseconds."""

    queue_us: float
    compute_input_us: float
    compute_infer_us: float
    compute_output_us: float
    #: Requests that were executed together; with `batch`, rows.
    mean_batch: float
    requests: int


class PointRow(msgspec.Struct, frozen=True):
    """One load of one server."""

    #: Requests that were always in flight; of an open loop, the most that could be.
    connections: int
    #: Requests per second that were due; 0 in a closed loop.
    target_rate: float
    #: Length of the measurement in seconds.
    seconds: float
    completed: int
    failed: int
    #: Successes per second.
    rate: float
    latency: LatencyFigures
    client: ClientFigures
    #: Of streams: until the first response, the mean between two responses of a request, and responses per second.
    first_response: LatencyFigures | None = None
    response_gap: LatencyFigures | None = None
    response_rate: float = 0.0
    server: ServerTimes | None = None
    errors: dict[str, int] = {}
    #: Of an open loop: requests that were due and never sent, and the most that waited for a connection at once.
    unsent: int = 0
    most_waiting: int = 0
    #: How much the seconds differed: standard deviation through mean; 0 for short loads.
    variation: float = 0.0
    #: A person has ended it early.
    stopped: bool = False


class BenchRun(msgspec.Struct, frozen=True):
    """All loads of one server, as `--json` prints them and `--against` reads them."""

    #: The address as it was given, the server's name and version, and which protocol was spoken.
    label: str
    server: str
    protocol: str
    model: str
    batch: int
    #: What else was asked for, in words: streaming, sequences, shared memory, the inputs.
    kind: str
    points: list[PointRow]
    notes: list[str] = []


class StoredRuns(msgspec.Struct, frozen=True):
    """The JSON of `naiad bench`."""

    naiad_bench: int
    runs: list[BenchRun]


#: The number of the form above.
FORMAT = 1


def percent_name(percent: float) -> str:
    """Return 99.0 as "99"."""
    return f"{percent:g}"


def _joined(parts: Sequence[Latencies]) -> LatencyHistogram:
    found = LatencyHistogram()
    for each in parts:
        found.add(each.counts, each.total, each.largest)
    return found


def _figures(histogram: LatencyHistogram, percents: Sequence[float]) -> LatencyFigures:
    return LatencyFigures(
        histogram.mean / 1e3,
        histogram.largest / 1e3,
        {percent_name(each): histogram.percentile(each) / 1e3 for each in percents},
    )


def point_row(
    results: Sequence[PointResult],
    percents: Sequence[float],
    *,
    connections: int,
    target_rate: float = 0.0,
    server: ServerTimes | None = None,
    stopped: bool = False,
) -> PointRow:
    """Return the row of a load: `results` has an entry for each load process."""
    seconds = max((each.measured_ns for each in results), default=0) / 1e9
    completed = sum(each.completed for each in results)
    latencies = _joined([each.latencies for each in results])
    firsts, gaps = (_joined([getattr(each, name) for each in results]) for name in ("first_responses", "response_gaps"))
    errors: Counter[str] = Counter()
    for each in results:
        errors.update(each.errors)
    cpu_ns = sum(each.cpu_ns for each in results)
    busy = max((each.cpu_ns / each.measured_ns for each in results if each.measured_ns), default=0.0)
    late = _joined([each.lateness for each in results])
    responses = sum(each.responses for each in results)
    return PointRow(
        connections=connections,
        target_rate=target_rate,
        seconds=seconds,
        completed=completed,
        failed=sum(errors.values()),
        rate=completed / seconds if seconds else 0.0,
        latency=_figures(latencies, percents),
        client=ClientFigures(cpu_ns / 1e3 / completed if completed else 0.0, busy, late.percentile(99) / 1e3),
        first_response=_figures(firsts, percents) if firsts.count else None,
        response_gap=_figures(gaps, percents) if gaps.count else None,
        response_rate=responses / seconds if seconds and firsts.count else 0.0,
        server=server,
        errors=dict(errors.most_common()),
        unsent=sum(each.unsent for each in results),
        most_waiting=sum(each.most_waiting for each in results),
        variation=variation(results, int(seconds)),
        stopped=stopped,
    )


def variation(results: Sequence[PointResult], seconds: int) -> float:
    """Return the standard deviation of the rates of the whole seconds through their mean; 0 for less than three."""
    if seconds < 3:
        return 0.0
    sums = [
        sum(each.by_second[second] for each in results if second < len(each.by_second)) for second in range(seconds)
    ]
    mean = statistics.fmean(sums)
    return statistics.pstdev(sums) / mean if mean else 0.0


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
