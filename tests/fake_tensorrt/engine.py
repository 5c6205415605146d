"""The runtime and the engine of the fake TensorRT."""

from __future__ import annotations

import os
import weakref

from tests.fake_cuda import runtime as cuda
from tests.fake_tensorrt.execution import IExecutionContext
from tests.fake_tensorrt.names import (
    DataType,
    ExecutionContextAllocationStrategy,
    ILogger,
    TensorFormat,
    TensorIOMode,
    TensorLocation,
)
from tests.fake_tensorrt.plan import VERSION, PlanFile, PlanTensor, decode


class Runtime:
    """Loads engines. Texts of errors are those of the real one."""

    def __init__(self, logger: ILogger) -> None:
        self.logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        plan = decode(serialized_engine)
        reason = self._refusal(plan)
        if reason:
            text = f"IRuntime::deserializeCudaEngine: Error Code 1: {reason}"
            self.logger.log(ILogger.Severity.ERROR, text)
            return None
        assert plan is not None
        return ICudaEngine(plan, self.logger)

    def _refusal(self, plan: PlanFile | None) -> str:
        if plan is None:
            return "Serialization (Serialization assertion magicTagRead == kMAGIC_TAG failed.Magic tag does not match)"
        capability = os.environ.get("FAKE_CUDA_CAPABILITY", "9.0")
        if plan.version != VERSION and not plan.version_compatible:
            return (
                "The engine plan file is not compatible with this version of TensorRT, expecting library version "
                f"{VERSION} got {plan.version}, please rebuild."
            )
        if plan.version_compatible and not self.engine_host_code_allowed:
            return "API Usage Error (The engine contains host code, and engineHostCodeAllowed is false)"
        if plan.capability != capability and not plan.any_device:
            return (
                "The engine plan file is generated on an incompatible device, expecting compute "
                f"{capability} got compute {plan.capability}, please rebuild."
            )
        return ""


class ICudaEngine:
    """An engine."""

    def __init__(self, plan: PlanFile, logger: ILogger) -> None:
        self.plan = plan
        self.logger = logger
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}

    @property
    def num_io_tensors(self) -> int:
        return len(self.plan.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.plan.profiles)

    @property
    def device_memory_size_v2(self) -> int:
        return 4096

    def tensor(self, name: str) -> PlanTensor:
        return self._tensors[name]

    def get_tensor_name(self, index: int) -> str:
        return self.plan.tensors[index].name

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if self.tensor(name).is_input else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensor(name).dtype]

    def get_tensor_shape(self, name: str) -> list[int]:
        return list(self.tensor(name).shape)

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if self.tensor(name).on_host else TensorLocation.DEVICE

    def get_tensor_format(self, name: str) -> TensorFormat:
        return TensorFormat[self.tensor(name).format]

    def is_shape_inference_io(self, name: str) -> bool:
        return self.tensor(name).is_shape_tensor

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        shape = self.tensor(name).shape
        return self.plan.profiles[profile_index].get(name, [shape] * 3)

    def get_tensor_profile_values(self, profile_index: int, name: str) -> list[list[int]]:
        assert isinstance(profile_index, int), "the profile comes first"
        if -1 in self.tensor(name).shape:
            raise ValueError("cannot create std::vector larger than max_size()")
        if profile_index >= len(self.plan.values):
            return []
        return self.plan.values[profile_index].get(name, [])

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> IExecutionContext | None:
        context = IExecutionContext(self, strategy)
        if strategy is ExecutionContextAllocationStrategy.STATIC:
            code, address = cuda.cudaMalloc(self.device_memory_size_v2)
            if int(code):
                return None
            weakref.finalize(context, cuda.cudaFree, address)
        return context
