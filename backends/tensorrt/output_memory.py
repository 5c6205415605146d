"""Memory of the device for the outputs of an instance. It is reused by each batch, and grows as outputs need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel.errors import ServingError

if TYPE_CHECKING:
    from backends.worker.devices.instance_device import DeviceBlock, InstanceDevice


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
