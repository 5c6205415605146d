"""The figures of `bench density`, as they are stored: of servers with 1 to 200 models, and of restarts."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from bench.machine import Machine  # noqa: TC001 - msgspec reads it
from bench.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Footprint(msgspec.Struct, frozen=True):
    """The memory of a server whose models are loaded. A worker is a process with an instance; Triton's are stubs."""

    #: Of the main process: our kernel, `tritonserver`.
    main: ProcessMemory
    worker_count: int
    #: Medians of the workers, in bytes; 0 without workers.
    worker_private: int
    worker_proportional: int
    #: Of all processes: main process, workers, zygotes, helpers, watchers.
    together: ProcessMemory

    @classmethod
    def of(cls, main: int, workers: Sequence[int], memories: Mapping[int, ProcessMemory]) -> Footprint:
        """Add up the memories of processes by their ids: all processes of a server, `main` and `workers` among them."""
        found = [memories[pid] for pid in workers if pid in memories]
        return cls(
            main=memories[main],
            worker_count=len(found),
            worker_private=round(statistics.median([each.private for each in found] or [0])),
            worker_proportional=round(statistics.median([each.proportional for each in found] or [0])),
            together=sum(memories.values(), ProcessMemory()),
        )


class DensityPoint(msgspec.Struct, frozen=True):
    """A server with `models` copies of one model. `ready_s` is from the command until it takes requests."""

    kind: str
    server: str
    models: int
    ready_s: float
    footprint: Footprint
    #: Requests per second by protocol, when the models are asked in turn.
    rates: dict[str, float]


class Restarts(msgspec.Struct, frozen=True):
    """Kills of the worker of a Python model, in ms: from the kill to the next response, and the part of its load."""

    total_ms: list[float]
    load_ms: list[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.total_ms)

    @property
    def median_load_ms(self) -> float:
        return statistics.median(self.load_ms)


class Density(msgspec.Struct, frozen=True):
    """A whole measurement. `triton` is empty if only our server was measured."""

    machine: Machine
    client: str
    connections: int
    seconds: float
    triton: str
    points: list[DensityPoint]
    restarts: Restarts | None
    #: What was not measured, and why.
    skipped: list[str]
