"""Execution contexts of the fake TensorRT. They compute with NumPy, when their stream is waited for."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fake_cuda import runtime as cuda
from tests.fake_tensorrt.names import ExecutionContextAllocationStrategy, ILogger

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fake_tensorrt.engine import ICudaEngine

_TYPES = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": np.uint16,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}


class IOutputAllocator:
    """The base class of allocators. As the real one, it wants its `__init__` called."""

    def __init__(self) -> None:
        self.initialised = True


class _Execution:
    """One execution, with the shapes and addresses of the moment when it was enqueued."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self.run = compute


class IExecutionContext:
    """Runs an engine with one of its profiles."""

    def __init__(self, engine: ICudaEngine, strategy: ExecutionContextAllocationStrategy) -> None:
        self.engine = engine
        self.profile = 0
        self._memory_missing = strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self._shapes: dict[str, tuple[int, ...]] = {
            tensor.name: tuple(tensor.shape) for tensor in engine.plan.tensors if tensor.is_input
        }
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            return self._failed(f"profile {profile_index} is not in range")
        self.profile = profile_index
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0 or memory
        assert size >= self.engine.device_memory_size_v2
        self._memory_missing = False

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        if len(shape) != len(low) or any(not a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
            return self._failed(f"IExecutionContext::setInputShape: Error Code 3: '{name}' is not in the profile")
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        try:
            self.engine.tensor(name)
        except KeyError:
            return self._failed(f"no tensor '{name}'")
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        assert output_allocator.initialised
        self._allocators[name] = output_allocator
        return True

    def infer_shapes(self) -> list[str]:
        missing = [name for name, shape in self._shapes.items() if -1 in shape]
        shape_tensors = [each.name for each in self.engine.plan.tensors if each.is_input and each.is_shape_tensor]
        return missing + [name for name in shape_tensors if name not in self._addresses]

    def get_tensor_shape(self, name: str) -> list[int]:
        if name in self._shapes:
            return list(self._shapes[name])
        operation, *sources = self.engine.plan.program[name]
        first = self._shapes[sources[0]]
        if operation == "nonzero":
            return [len(first), -1]
        if operation == "rows":
            return [1]
        if operation == "fill":
            return [int(each) for each in self._read(sources[0])]
        if operation == "total":
            return list(first[:1])
        return list(first)

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle, "never the default stream"
        if self._memory_missing:
            return self._failed("Error Code 3: API Usage Error (no device memory was set)")
        if self.infer_shapes():
            return self._failed(f"Error Code 3: API Usage Error (shapes are missing: {self.infer_shapes()})")
        for tensor in self.engine.plan.tensors:
            address = self._addresses.get(tensor.name, 0)
            if not address and tensor.name not in self._allocators:
                return self._failed(f"Error Code 3: API Usage Error (no address for '{tensor.name}')")
            if not tensor.on_host and not tensor.is_shape_tensor and address % 256 and -1 not in tensor.shape:
                return self._failed(f"Error Code 3: API Usage Error ('{tensor.name}' is misaligned)")
        stream = cuda.cudaStream_t(stream_handle)
        places = dict(self._addresses)
        shapes = {tensor.name: tuple(self.get_tensor_shape(tensor.name)) for tensor in self.engine.plan.tensors}
        for name, shape in list(shapes.items()):
            if -1 in shape:
                stream.run()  # the real one computes until it knows the shape
                array = self._value(name, places, shapes)
                allocator = self._allocators[name]
                places[name] = allocator.reallocate_output_async(name, 0, array.nbytes, 256, stream_handle)
                if not places[name]:
                    return self._failed("Error Code 2: OutOfMemory (the output allocator has no memory)")
                allocator.notify_shape(name, array.shape)
                shapes[name] = array.shape
        stream.work.append(_Execution(lambda: self._compute(places, shapes)))
        return True

    def _compute(self, places: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        values = {name: self._value(name, places, shapes) for name in self.engine.plan.program}
        for name, value in values.items():
            array: Any = np.ascontiguousarray(value, _TYPES[self.engine.tensor(name).dtype])
            assert array.shape == shapes[name]
            ctypes.memmove(places[name], array.ctypes.data, array.nbytes)

    def _value(self, name: str, places: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> Any:
        operation, *sources = self.engine.plan.program[name]
        inputs = [self._read(each, places[each], shapes[each]) for each in sources]
        if operation == "add":
            return inputs[0] + inputs[1]
        if operation == "sub":
            return inputs[0] - inputs[1]
        if operation == "nonzero":
            return np.array(np.nonzero(inputs[0]))
        if operation == "rows":
            return np.array([shapes[sources[0]][0]])
        if operation == "fill":
            return np.ones(inputs[0].tolist())
        if operation == "total":
            return inputs[0].reshape(len(inputs[0]), -1).sum(axis=1)
        return inputs[0]

    def _read(self, name: str, address: int = 0, shape: tuple[int, ...] = ()) -> Any:
        address, shape = address or self._addresses[name], shape or self._shapes[name]
        dtype = np.dtype(_TYPES[self.engine.tensor(name).dtype])
        count = int(np.prod(shape, dtype=np.int64))
        data = ctypes.string_at(address, count * dtype.itemsize) if count else b""
        return np.frombuffer(data, dtype).reshape(shape)

    def _failed(self, text: str) -> bool:
        self.engine.logger.log(ILogger.Severity.ERROR, text)
        return False
