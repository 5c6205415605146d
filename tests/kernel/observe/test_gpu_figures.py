"""Figures of GPUs: how often they are read, and how long a page waits for them."""

from __future__ import annotations

import asyncio

import pytest

from kernel.observe import gpu_figures
from kernel.observe.gpu_figures import GpuFigureReader, GpuFigures
from kernel.repository.gpus import PinnedPool
from protocols.http.metrics.server_families import GPU_FAMILIES, render_gpus

pytestmark = pytest.mark.anyio


class Source:
    """Has one GPU, whose energy rises by 2 J with each read, after `gate` is open."""

    def __init__(self) -> None:
        self.reads = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def usable(self) -> object:
        return None

    async def figures(self) -> list[GpuFigures]:
        await self.gate.wait()
        self.reads += 1
        return [GpuFigures("GPU-1", utilization=0.5, energy_j=100.0 + 2 * self.reads)]


def reader(source: Source) -> GpuFigureReader:
    return GpuFigureReader(source, PinnedPool(7), interval_ms=1000)


async def test_figures_are_read_once_in_an_interval_and_energy_counts_from_the_first() -> None:
    source = Source()
    figures = reader(source)
    for now_ms, reads, energy in ((0, 1, 0), (999, 1, 0), (1000, 2, 2)):
        await figures.refresh(now_ms * 1_000_000)
        assert (source.reads, figures.figures[0].energy_j) == (reads, energy)


async def test_a_page_does_not_wait_for_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_figures, "WAIT_S", 0)
    source = Source()
    source.gate.clear()
    figures = reader(source)
    await figures.refresh(0)
    await figures.refresh(10_000_000_000)
    assert figures.figures == ()
    await figures.close()
    assert source.reads == 0


async def test_a_figure_that_a_driver_does_not_say_has_no_line() -> None:
    figures = reader(Source())
    await figures.refresh(0)
    lines = render_gpus(figures)
    assert 'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5' in lines
    assert not any(line.startswith("nv_gpu_power_usage{") for line in lines)
    assert sum(line.startswith("# TYPE") for line in lines) == len(GPU_FAMILIES) + 2


def test_a_server_without_gpus_has_only_the_families_of_pinned_memory_and_they_are_zero() -> None:
    figures = GpuFigureReader(None, PinnedPool(7), 1)  # type: ignore[arg-type]  # nobody reads
    lines = [line for line in render_gpus(figures) if not line.startswith("#")]
    assert lines == ["nv_pinned_memory_pool_total_bytes 0", "nv_pinned_memory_pool_used_bytes 0"]
