"""The figures of GPUs for the metrics page: read at most once in an interval, and never waited for long.

The device helper is asked for them (`backends/helper/device_tasks.py`), and returns them in JSON.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How long a page waits for new figures, in seconds. A driver may take longer: the page shows the last ones then.
WAIT_S = 1.0


class GpuFigures(msgspec.Struct):
    """What is known of a GPU. None for what its driver does not say."""

    uuid: str
    #: 0 to 1.
    utilization: float | None = None
    total_byte_size: int | None = None
    used_byte_size: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    #: Since the driver was loaded.
    energy_j: float | None = None


class FigureSource(Protocol):
    """Implemented by `backends.supervision.gpus`."""

    async def usable(self) -> object:
        """Look for the GPUs, once."""

    async def figures(self) -> list[GpuFigures]:
        """Return the figures of the GPUs; none if they cannot be read."""


class PinnedMemory(Protocol):
    """The pinned memory of the host that instances on GPUs have."""

    byte_size: int
    used_byte_size: int


class GpuFigureReader:
    """Keeps the last figures. `energy_j` counts from the first read on (Triton)."""

    def __init__(self, source: FigureSource, pinned: PinnedMemory, interval_ms: int) -> None:
        self.pinned = pinned
        self.figures: Sequence[GpuFigures] = ()
        self._source = source
        self._interval_ns = interval_ms * 1_000_000
        self._read_ns: int | None = None
        self._reading: asyncio.Task[None] | None = None
        self._first_energy_j: dict[str, float] = {}

    async def refresh(self, now_ns: int) -> None:
        """Read the figures if the last ones are older than the interval. Waits `WAIT_S` at most."""
        if self._reading is None and (self._read_ns is None or now_ns - self._read_ns >= self._interval_ns):
            self._read_ns = now_ns
            self._reading = asyncio.create_task(self._read())
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=WAIT_S)

    async def _read(self) -> None:
        try:
            await self._source.usable()
            self.take(await self._source.figures())
        finally:
            self._reading = None

    def take(self, figures: Sequence[GpuFigures]) -> None:
        """Keep these figures."""
        for each in figures:
            if each.energy_j is not None:
                each.energy_j -= self._first_energy_j.setdefault(each.uuid, each.energy_j)
        self.figures = figures

    async def close(self) -> None:
        """End a read that still runs."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])


FIND_GPUS, READ_FIGURES = "find_gpus", "read_figures"


class FoundGpu(msgspec.Struct):
    """A GPU that this machine has, in the order of CUDA's numbers."""

    name: str
    uuid: str
    capability: tuple[int, int]
    byte_size: int
    #: Whether `uuid` in CUDA_VISIBLE_DEVICES would not choose it: it is a part of a GPU (MIG), which CUDA shows under
    #: the name of the whole.
    is_mig: bool = False


class FoundGpus(msgspec.Struct):
    """The result of `find_gpus`; `unavailable` says why there is none."""

    gpus: list[FoundGpu] = []
    unavailable: str = ""
    #: Whether there may be GPUs in a while: their driver is starting.
    is_passing: bool = False


class ReadFigures(msgspec.Struct):
    """The result of `read_figures`, for the GPUs that were asked for; `unavailable` says why there are none."""

    figures: list[GpuFigures] = []
    unavailable: str = ""
