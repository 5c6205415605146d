"""The page of metrics of a server without models."""

from __future__ import annotations

import re

from kernel.observe.generation_statistics import FAMILIES
from kernel.observe.gpu_figures import GpuFigureReader, GpuFigures
from kernel.observe.metrics_config import MetricsConfig
from kernel.options import MetricsOptions
from kernel.repository.gpus import PinnedPool
from kernel.server_parts import DoorFigures, DoorProcessFigures, DoorProcessList, LauncherFigures, ServerPart
from kernel.serving.interface import CacheFigures
from protocols.http.metrics.model_families import render_models, render_readiness
from protocols.http.metrics.server_families import ServerMetrics, render_cache, render_gpus, render_memory
from tests.protocols.front_door_lab import FrontDoorLab

#: With all families that settings can enable.
ALL = MetricsConfig(histogram_latencies=True, summary_latencies=True)


def kinds(page: str) -> dict[str, str]:
    """Return the kinds of the families on a page, by their names."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


def language_kinds() -> dict[str, str]:
    """Return the kinds of the families that only models have which generate text."""
    return {name: kind.value for name, kind, _, _ in FAMILIES}


class _Door(ServerPart):
    def figures(self) -> DoorFigures:
        return DoorFigures("http", 1)


class _DoorProcesses(ServerPart):
    def figures(self) -> DoorProcessList:
        return DoorProcessList(0, 0, [DoorProcessFigures(1, 1, 1, 1, True)])


class _Launcher(ServerPart):
    def figures(self) -> LauncherFigures:
        return LauncherFigures("ray", True, 1, {"10.0.0.2": 1})


def shown_page(*, cache: bool) -> str:
    """Return a page with all families of a server; with `cache`, only those that its response cache adds."""
    if cache:
        return "\n".join(render_cache([], CacheFigures(byte_size=1), ALL, 0))
    kernel = FrontDoorLab().kernel
    kernel.server_parts += [_Door(), _DoorProcesses(), _Launcher()]
    server = ServerMetrics(kernel, MetricsOptions(), 0).render(0)
    gpus = GpuFigureReader(None, PinnedPool(1), 1)  # type: ignore[arg-type]  # nobody reads
    gpus.take([GpuFigures("GPU-1")])
    ours = [*render_readiness([]), *render_memory([], {}), *render_gpus(gpus)]
    return "\n".join([*render_models([], ALL, 0), *ours, server])
