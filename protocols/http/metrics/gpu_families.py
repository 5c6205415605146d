"""The metrics of GPUs: Triton's names, help texts and labels (core/src/metrics.cc). Only for servers that have GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocols.http.metrics.text import number

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.observe.reporting.gpu_figures import GpuFigureReader, GpuFigures


class GpuFamily(msgspec.Struct, frozen=True):
    """A family with one value for each GPU that has it."""

    name: str
    help: str
    value: Callable[[GpuFigures], float | None]
    kind: str = "gauge"


FAMILIES = (
    GpuFamily("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", lambda gpu: gpu.utilization),
    GpuFamily("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", lambda gpu: gpu.total_byte_size),
    GpuFamily("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", lambda gpu: gpu.used_byte_size),
    GpuFamily("nv_gpu_power_usage", "GPU power usage in watts", lambda gpu: gpu.power_w),
    GpuFamily("nv_gpu_power_limit", "GPU power management limit in watts", lambda gpu: gpu.power_limit_w),
    GpuFamily(
        "nv_energy_consumption", "GPU energy consumption in joules since the Triton Server started",
        lambda gpu: gpu.energy_j, kind="counter",
    ),
)  # fmt: skip


def render_gpus(reader: GpuFigureReader | None) -> list[str]:
    """Return the lines of all families; of a server without a GPU those of pinned memory, which it has none of."""
    lines: list[str] = []
    figures = () if reader is None else reader.figures
    pinned = (0, 0) if reader is None or not figures else (reader.pinned.byte_size, reader.pinned.used_byte_size)
    for family in FAMILIES if figures else ():
        lines += _head(family.name, family.help, family.kind)
        for gpu in figures:
            value = family.value(gpu)
            if value is not None:
                lines.append(f'{family.name}{{gpu_uuid="{gpu.uuid}"}} {number(value)}')
    for name, what, byte_size in (
        ("nv_pinned_memory_pool_total_bytes", "total", pinned[0]),
        ("nv_pinned_memory_pool_used_bytes", "used", pinned[1]),
    ):
        lines += [*_head(name, f"Pinned memory pool {what} memory size, in bytes", "gauge"), f"{name} {byte_size}"]
    return lines


def _head(name: str, help_text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
