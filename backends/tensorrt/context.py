"""An execution context: an engine with one of its optimization profiles. It enqueues one batch at a time.

Memory of the device for the outputs of an instance. It is reused by each batch, and grows as outputs need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from backends.worker.devices.tensors import DeviceArray
from kernel.errors import InternalError, InvalidArgument, ServingError
from shm.arrays import NUMPY_TYPES, array_address
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from backends.tensorrt.library import TensorRt
    from backends.tensorrt.signature import EngineSignature, EngineTensor, Profile
    from backends.worker.devices.instance_device import DeviceBlock, InstanceDevice
    from shm.arrays import Array

    #: Name, datatype and shape of an output → where the client wants it on the device; None for anywhere.
    Placer = Callable[[str, str, tuple[int, ...]], "DeviceArray | None"]


class OutputBlocks:
    """A block for each output, and another one while batches overlap (`InstanceDevice.block_set`).

    What was in a block is lost when it grows, or with the next batch that uses it.
    """

    def __init__(self, device: InstanceDevice) -> None:
        self._device = device
        self._blocks: dict[tuple[int, str], DeviceBlock] = {}

    def block(self, name: str, byte_size: int) -> DeviceBlock:
        """Return the block of an output, with at least `byte_size` bytes. Raises `InternalError` without memory."""
        return self._block(self._device.block_set, name, byte_size)

    def other_block(self, name: str, byte_size: int) -> DeviceBlock:
        """As `block`, for the batch after this one."""
        return self._block(1 - self._device.block_set, name, byte_size)

    def _block(self, block_set: int, name: str, byte_size: int) -> DeviceBlock:
        found = self._blocks.get((block_set, name))
        if found is None or found.byte_size < byte_size:
            if found is not None:
                self._device.keep(found)  # what was enqueued may still use it
            found = self._blocks[block_set, name] = self._device.allocate(max(byte_size, 1))
        return found


class DataDependentOutput:
    """An output whose shape TensorRT knows only while it computes it: TensorRT asks for memory, then says the shape."""

    def __init__(self, name: str, blocks: OutputBlocks) -> None:
        self._name = name
        self._blocks = blocks
        self.address = 0
        self.shape: tuple[int, ...] = ()
        #: What has failed in a call by TensorRT, which cannot take exceptions.
        self.failure: ServingError | None = None

    def reset(self) -> None:
        """Begin another batch."""
        self.address, self.shape, self.failure = 0, (), None

    def allocate(self, byte_size: int) -> int:
        """Return the address of memory for the output; 0 if there is none."""
        try:
            # In powers of two: a growing output is not allocated anew for each batch.
            self.address = self._blocks.block(self._name, 1 << max(byte_size - 1, 0).bit_length()).address
        except ServingError as error:
            self.failure = error
            self.address = 0
        return self.address


def tensorrt_allocator(module: Any, output: DataDependentOutput) -> Any:
    """Return a `tensorrt.IOutputAllocator` that asks `output`. Keep it as long as its context: TensorRT does not."""

    class Allocator(module.IOutputAllocator):  # type: ignore[misc]  # a class that is known only now
        """Called within `execute_async_v3`, in its thread."""

        def __init__(self) -> None:
            module.IOutputAllocator.__init__(self)

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            return output.allocate(size)

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return output.allocate(size)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            output.shape = tuple(shape)

    return Allocator()


#: The most shapes whose outputs are remembered.
_MAX_KNOWN_SHAPES = 64


class EngineContext:
    """Runs batches. Owns the addresses that TensorRT was given, and the memory of shape tensors on the host."""

    def __init__(
        self,
        tensorrt: TensorRt,
        context: Any,
        signature: EngineSignature,
        profile: Profile,
        device: InstanceDevice,
        blocks: OutputBlocks,
        instance_name: str,
    ) -> None:
        """`context` is a `tensorrt.IExecutionContext` whose profile is `profile`."""
        self.profile = profile
        self.context = context
        self._tensorrt = tensorrt
        self._signature = signature
        self._device = device
        self._blocks = blocks
        self._name = instance_name
        self._inputs = signature.inputs
        self._outputs = signature.outputs
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        #: Tensors on the host, by name: TensorRT reads and writes them there.
        self._on_host: dict[str, Array] = {}
        #: Shapes of the inputs → shapes of the outputs. Not for models with shape tensors.
        self._known: dict[tuple[tuple[int, ...], ...], dict[str, tuple[int, ...]]] = {}
        self._dependent: dict[str, DataDependentOutput] = {}
        self._allocators: list[Any] = []

    # ---- shapes ----------------------------------------------------------------------------------

    def output_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Array]
    ) -> dict[str, tuple[int, ...]]:
        """Set the shapes of all inputs, and return those of the outputs: -1 where they depend on the inputs' values.

        `values` are the elements of shape tensors. Raises `InvalidArgument` for what the engine refuses.
        """
        self._tensorrt.log.take_errors()
        for name, shape in shapes.items():
            self._set_shape(name, shape)
        for name, array in values.items():
            if -1 in self._inputs[name].dims:
                self._set_shape(name, array.shape)
            self._set_values(name, array)
        key = () if values else tuple(self._shapes[name] for name in self._inputs)
        found = self._known.get(key) if key else None
        if found is None:
            found = self._inferred()
            if key:
                if len(self._known) >= _MAX_KNOWN_SHAPES:
                    self._known.clear()
                self._known[key] = found
        return found

    def _inferred(self) -> dict[str, tuple[int, ...]]:
        try:
            missing = self.context.infer_shapes()
        except RuntimeError as error:
            raise self._refused(str(error)) from None
        if missing:
            raise self._refused(f"failed to specify the dimensions of all input bindings: {', '.join(missing)}")
        return {name: tuple(map(int, self.context.get_tensor_shape(name))) for name in self._outputs}

    def _set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self._shapes.get(name) != shape:
            if not self.context.set_input_shape(name, shape):
                raise self._refused(f"trt failed to set binding dimension to {list(shape)} for input '{name}'")
            self._shapes[name] = shape

    def _set_values(self, name: str, array: Array) -> None:
        memory = self._on_host.get(name)
        if memory is None or memory.shape != array.shape:
            memory = self._on_host[name] = np.empty_like(array, order="C")
            self.set_address(name, array_address(memory))
        memory[...] = array

    def _refused(self, text: str) -> InvalidArgument:
        reason = self._tensorrt.log.take_errors()
        return InvalidArgument(f"{text} for {self._name}{f': {reason}' if reason else ''}")

    # ---- execution -------------------------------------------------------------------------------

    def set_address(self, name: str, address: int) -> None:
        """Say where a tensor is. Raises `InternalError` for a tensor that the engine does not have."""
        if self._addresses.get(name) != address:
            if not self.context.set_tensor_address(name, address):
                raise InternalError(f"'{name}' does not map to an input or output tensor")
            self._addresses[name] = address

    def run(
        self, inputs: Mapping[str, DeviceArray], values: Mapping[str, Array], place: Placer, stream: int
    ) -> dict[str, DeviceArray | Array]:
        """Enqueue a batch on `stream` and return its outputs, in the engine's shapes.

        Arrays on the device are valid until the next run, when the stream has done what is enqueued; those on the host
        are complete. Raises `InvalidArgument` for inputs that the engine refuses, `InternalError`.
        """
        output_shapes = self.output_shapes({name: array.shape for name, array in inputs.items()}, values)
        for name, array in inputs.items():
            self.set_address(name, array.address)
        placed: dict[str, DeviceArray | Array] = {}
        for name, shape in output_shapes.items():
            tensor = self._outputs[name]
            if -1 in shape:
                self._dependent_output(name).reset()
            elif tensor.on_host:
                placed[name] = self._host_output(tensor, shape)
            else:
                placed[name] = array = self._device_output(tensor, shape, place)
                self.set_address(name, array.address)
        self.enqueue(stream)
        for name in output_shapes:
            if name not in placed:
                placed[name] = self._computed_output(name)
        if any(tensor.on_host for tensor in self._outputs.values()):
            if stream != self._device.stream:
                self._device.after(stream)
            self._device.synchronize()
        return placed

    def enqueue(self, stream: int) -> None:
        """Enqueue an execution with the shapes and addresses that are set. Raises `InternalError`."""
        self._tensorrt.log.take_errors()
        self._device.computes()
        if not self.context.execute_async_v3(stream):
            failures = [each.failure for each in self._dependent.values() if each.failure is not None]
            reason = self._tensorrt.log.take_errors() or "TensorRT gives no reason"
            if failures:
                reason = str(failures[0])
            raise InternalError(f"unable to enqueue for inference {self._name}: {reason}")

    # ---- outputs ---------------------------------------------------------------------------------

    def _device_output(self, tensor: EngineTensor, shape: tuple[int, ...], place: Placer) -> DeviceArray:
        found = place(tensor.name, tensor.datatype, shape)
        if found is not None:
            return found
        block = self._blocks.block(tensor.name, _byte_size(tensor, shape))
        return DeviceArray(block.address, tensor.datatype, shape, self._device.device_id, block)

    def _host_output(self, tensor: EngineTensor, shape: tuple[int, ...]) -> Array:
        array: Array = np.zeros(shape, NUMPY_TYPES[tensor.datatype])
        self._on_host[tensor.name] = array  # TensorRT keeps the address only
        self.set_address(tensor.name, array_address(array))
        return array

    def _dependent_output(self, name: str) -> DataDependentOutput:
        found = self._dependent.get(name)
        if found is None:
            found = self._dependent[name] = DataDependentOutput(name, self._blocks)
            allocator = tensorrt_allocator(self._tensorrt.module, found)
            self._allocators.append(allocator)
            self.context.set_output_allocator(name, allocator)
        return found

    def _computed_output(self, name: str) -> DeviceArray:
        tensor, found = self._outputs[name], self._dependent[name]
        if found.failure is not None:
            raise InternalError(f"no memory for output '{name}' for {self._name}: {found.failure}")
        if -1 in found.shape or not found.address:
            raise InternalError(f"TensorRT did not return the shape of output '{name}' for {self._name}")
        return DeviceArray(found.address, tensor.datatype, found.shape, self._device.device_id, self._blocks)


def _byte_size(tensor: EngineTensor, shape: tuple[int, ...]) -> int:
    return element_count(shape) * DATATYPES[tensor.datatype].byte_size
