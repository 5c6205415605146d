"""What workers and backends report of executions: times, sums of times for ensembles, memory of instances. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class ExecutionTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The times of one execution, in monotonic nanoseconds of the kernel's clock. The names are Triton's.

    The input stage ends at `input_end_ns`, the inference stage at `output_start_ns`, the output stage at
    `compute_end_ns`; each begins where the one before ends.
    """

    compute_start_ns: int
    input_end_ns: int
    output_start_ns: int
    compute_end_ns: int


class ReportedRequest(msgspec.Struct, frozen=True):
    """What a backend has reported about a request."""

    times: ExecutionTimes
    success: bool = True


class ReportedExecution(msgspec.Struct, frozen=True):
    """What a backend has reported about an execution, which may be a part of a batch."""

    rows: int
    times: ExecutionTimes


class TimeSums(Protocol):
    """Counters that hold sums of durations by stage, in nanoseconds."""

    input_ns: int
    infer_ns: int
    output_ns: int


class ComposedTimes:
    """The compute times of a request to an ensemble, in nanoseconds: the sums of the times of its steps (Triton).

    The times of a step are known when its execution has ended, which can be after the ensemble's final response. So the
    sums are collected first, and added to the ensemble's statistics when its request has succeeded, as are later times.
    """

    __slots__ = ("_counted_in", "infer_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0
        self._counted_in: tuple[TimeSums, ...] = ()

    def add(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Add the times of one execution of a step."""
        self.input_ns += input_ns
        self.infer_ns += infer_ns
        self.output_ns += output_ns
        for sums in self._counted_in:
            sums.input_ns += input_ns
            sums.infer_ns += infer_ns
            sums.output_ns += output_ns

    def count_in(self, *statistics: TimeSums) -> None:
        """Add what was collected to `statistics`, and from now on also what comes later."""
        self._counted_in = statistics
        for sums in statistics:
            sums.input_ns += self.input_ns
            sums.infer_ns += self.infer_ns
            sums.output_ns += self.output_ns


class MemoryUsage(msgspec.Struct, frozen=True):
    """Memory of one kind on one device."""

    #: CPU, CPU_PINNED or GPU.
    type: str
    #: Number of the device.
    id: int
    byte_size: int


class InstanceMemory:
    """Which instance uses how much."""

    def __init__(self) -> None:
        #: Name of the instance → what its backend has reported last, in the order of the report.
        self.by_instance: dict[str, tuple[MemoryUsage, ...]] = {}
        #: Name of the instance → the id of its worker process, if that is on this machine.
        self.pids: dict[str, int] = {}
        #: Name of the instance → how many workers it has had.
        self.starts: dict[str, int] = {}

    def report(self, instance: str, uses: Iterable[MemoryUsage]) -> None:
        """Note what an instance uses now, in place of what it has used before."""
        self.by_instance[instance] = tuple(uses)

    def worker_started(self, instance: str, pid: int) -> None:
        """An instance has a new worker. `pid` is 0 for one on another machine."""
        self.starts[instance] = self.starts.get(instance, 0) + 1
        if pid:
            self.pids[instance] = pid

    def forget(self, instance: str) -> None:
        """The worker of an instance has ended, and its memory is free."""
        self.pids.pop(instance, None)
        self.by_instance.pop(instance, None)

    def total(self) -> list[MemoryUsage]:
        """Return the sums over the instances, by kind and device (Triton)."""
        sums: dict[tuple[str, int], int] = {}
        for uses in self.by_instance.values():
            for use in uses:
                sums[use.type, use.id] = sums.get((use.type, use.id), 0) + use.byte_size
        return [MemoryUsage(kind, device, byte_size) for (kind, device), byte_size in sorted(sums.items())]
