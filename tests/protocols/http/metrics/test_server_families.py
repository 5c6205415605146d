"""The memory of instances on the page."""

from __future__ import annotations

import asyncio
import os

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.observe.execution_reports import MemoryUsage
from kernel.serving.model import Model
from kernel.serving.model_figures import figures_of
from kernel.testing import FakeClock, model_spec
from protocols.http.metrics.proc import WorkerMemoryReader
from protocols.http.metrics.server_families import render_memory
from schedulers.direct import direct


def model() -> Model:
    return Model(model_spec("m"), ModelConfig(), 1, direct, FakeClock())


def test_each_instance_has_what_its_backend_reports_and_what_its_process_uses() -> None:
    made = model()
    made.statistics.memory.report("m_0_0", [MemoryUsage("GPU", 1, 4096), MemoryUsage("CPU", 0, 7)])
    made.statistics.memory.worker_started("m_0_0", 17)
    made.statistics.memory.worker_started("m_0_1", 18)
    assert [
        line
        for line in render_memory([figures_of(made), figures_of(model())], {17: 100, 18: 0})
        if not line.startswith("#")
    ] == [
        'naiad_model_instance_memory_bytes{device="1",instance="m_0_0",kind="GPU",model="m",version="1"} 4096',
        'naiad_model_instance_memory_bytes{device="0",instance="m_0_0",kind="CPU",model="m",version="1"} 7',
        'naiad_worker_memory_bytes{instance="m_0_0",model="m",version="1"} 100',
    ]


def test_the_system_is_asked_once_per_interval_and_for_new_workers() -> None:
    reader, made = WorkerMemoryReader(1000), model()
    made.statistics.memory.worker_started("m_0_0", os.getpid())

    async def scenario() -> None:
        await reader.refresh([figures_of(made)], 2 * 10**9)
        first = reader.byte_sizes
        assert first[os.getpid()] > 1 << 20
        await reader.refresh([figures_of(made)], 2 * 10**9 + 999_999_999)
        assert reader.byte_sizes is first
        made.statistics.memory.worker_started("m_0_1", 2**22 + 1)  # no process has this id
        await reader.refresh([figures_of(made)], 2 * 10**9 + 999_999_999)
        assert reader.byte_sizes[2**22 + 1] == 0
        await reader.refresh([figures_of(made)], 3 * 10**9 + 999_999_999)
        assert reader.byte_sizes.keys() == {os.getpid(), 2**22 + 1}

    asyncio.run(scenario())
