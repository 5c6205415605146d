"""The builder of the fake TensorRT. Its "ONNX files" are the fake's plans, without what a build decides."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

from tests.fake_tensorrt.names import DataType, ILogger
from tests.fake_tensorrt.plan import PlanFile, PlanTensor, decode, encode


class BuilderFlag(enum.Enum):
    """TensorRT 11 has no FP16 and BF16 any more."""

    VERSION_COMPATIBLE = 1


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


class HardwareCompatibilityLevel(enum.Enum):
    NONE = 0
    AMPERE_PLUS = 1


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class IProgressMonitor:
    def __init__(self) -> None:
        self.initialised = True


class _Tensor:
    def __init__(self, tensor: PlanTensor) -> None:
        self.name = tensor.name
        self.dtype = DataType[tensor.dtype]
        self.shape = tensor.shape
        self.is_shape_tensor = tensor.is_shape_tensor


class INetworkDefinition:
    def __init__(self) -> None:
        self.plan = PlanFile([], {})

    @property
    def num_inputs(self) -> int:
        return sum(tensor.is_input for tensor in self.plan.tensors)

    @property
    def num_outputs(self) -> int:
        return len(self.plan.tensors) - self.num_inputs

    def get_input(self, index: int) -> _Tensor:
        return _Tensor([tensor for tensor in self.plan.tensors if tensor.is_input][index])

    def get_output(self, index: int) -> _Tensor:
        return _Tensor([tensor for tensor in self.plan.tensors if not tensor.is_input][index])


class ParserError:
    def desc(self) -> str:
        return "No importer registered for op: Teleport."

    def node(self) -> int:
        return 0

    def node_name(self) -> str:
        return "teleport_1"

    def node_operator(self) -> str:
        return "Teleport"


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network = network
        self.num_errors = 0

    def parse_from_file(self, model: str) -> bool:
        plan = decode(Path(model).read_bytes())
        if plan is None:
            self.num_errors = 1
            return False
        self._network.plan = plan
        return True

    def get_error(self, index: int) -> ParserError:
        return ParserError()


class ITimingCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data + b"+"


class IOptimizationProfile:
    def __init__(self) -> None:
        self.dims: dict[str, list[list[int]]] = {}
        self.values: dict[str, list[list[int]]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self.dims[input] = [list(min), list(opt), list(max)]

    def set_shape_input(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self.values[input] = [list(min), list(opt), list(max)]


class IBuilderConfig:
    def __init__(self) -> None:
        self.flags: list[BuilderFlag] = []
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE
        self.progress_monitor: Any = None
        self.profiles: list[IOptimizationProfile] = []
        self.pools: dict[str, int] = {}
        self._cache: ITimingCache | None = None

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.append(flag)

    def set_memory_pool_limit(self, pool: MemoryPoolType, size: int) -> None:
        self.pools[pool.name] = size

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, data: bytes) -> ITimingCache:
        return ITimingCache(data)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        if cache.data.startswith(b"other"):
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._cache


class Builder:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def create_network(self, flags: int) -> INetworkDefinition:
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> bytes | None:
        monitor = config.progress_monitor
        monitor.phase_start("Building Engine", None, 2)
        for step in range(2):
            monitor.phase_start("Tactic Selection", "Building Engine", 1)
            monitor.step_complete("Tactic Selection", 0)
            monitor.phase_finish("Tactic Selection")
            if not monitor.step_complete("Building Engine", step):
                return None
        monitor.phase_finish("Building Engine")
        plan = network.plan
        if "impossible" in str(plan.program):
            self._logger.log(ILogger.Severity.ERROR, "Error Code 10: Could not find any implementation for node X.")
            return None
        return encode(
            PlanFile(
                plan.tensors,
                plan.program,
                [profile.dims for profile in config.profiles],
                [profile.values for profile in config.profiles],
                version_compatible=BuilderFlag.VERSION_COMPATIBLE in config.flags,
                any_device=config.hardware_compatibility_level is not HardwareCompatibilityLevel.NONE,
                settings={"pools": config.pools},
            )
        )
