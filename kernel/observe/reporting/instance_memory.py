"""The memory that the instances of a model version use, as their backends report it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


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
