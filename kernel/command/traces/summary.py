"""How long the stages of traced requests took: by model, version and protocol. Pure.

The stages are those of Triton's trace_summary.py, in which `overhead` is what no other stage of its group explains.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.command.traces.reading import ReadTrace

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
