"""A kernel with models of fake instances, and what its callers send and get."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel import errors
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import InputPlacer
from kernel.records.tracer import Tracer
from kernel.serving.catalog import Catalog, ModelState
from kernel.serving.interface import KernelSettings
from kernel.serving.kernel import Kernel
from kernel.serving.model import Model
from kernel.settings import LogSettings, TraceSettings
from kernel.testing import FakeClock, FakeInstance, model_spec
from schedulers.direct import direct

if TYPE_CHECKING:
    from shm.blocks import ByteBudget


class Bench:
    """A kernel with one model `m` of one fake instance."""

    def __init__(self, budget: ByteBudget | None = None, **settings: object) -> None:
        self.catalog, self.regions = Catalog(), RegionRegistry()
        self.kernel = Kernel(
            self.catalog, self.regions, InputPlacer(self.regions, 1 << 20, budget), FakeClock(),
            KernelSettings(TraceSettings(), LogSettings(), **settings),  # type: ignore[arg-type]
            Tracer(TraceSettings(), FakeClock()),
        )  # fmt: skip
        self.model = Model(model_spec("m", dims=(-1,)), ModelConfig(), 1, direct, FakeClock())
        self.model.start()
        self.instance = FakeInstance("m_0")
        self.model.instances.add(self.instance)
        self.catalog.set_state("m", 1, ModelState.READY, "", self.model)

    def close(self) -> None:
        self.model.close(errors.ServerStopping(""))
        self.regions.close()
