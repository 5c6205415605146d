"""CUDA graphs of an engine, which this server captures itself.

Each graph has an execution context of its own, because a graph is undefined once its context has other shapes. The
contexts share the memory of their activations: an instance executes one batch at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.tensorrt.context import EngineContext, OutputBlocks
from backends.tensorrt.profiles import graph_key
from backends.worker.devices.device_graphs import DeviceGraphs
from backends.worker.devices.instance_device import end_if_lost
from kernel.errors import InternalError, ServingError
from shm.cuda import CudaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.tensorrt.library import TensorRt
    from backends.tensorrt.signature import EngineSignature, Profile
    from backends.worker.devices.graph_specs import GraphKey, GraphSpec
    from backends.worker.devices.instance_device import DeviceBlock, InstanceDevice
    from backends.worker.devices.tensors import DeviceArray


class EngineGraphs(DeviceGraphs):
    """The graphs of one optimization profile."""

    def __init__(
        self,
        tensorrt: TensorRt,
        engine: Any,
        signature: EngineSignature,
        profile: Profile,
        device: InstanceDevice,
        name: str,
        stream: int,
        *,
        batched: bool,
    ) -> None:
        """`stream` is the address of the stream that executes, `name` is the instance's."""
        super().__init__(device, stream, name)
        self._tensorrt = tensorrt
        self._engine = engine
        self._signature = signature
        self._profile = profile
        self._stream_address = stream
        self._batched = batched
        self._activations: DeviceBlock | None = None

    def capture(self, specs: Sequence[GraphSpec], warn: Callable[[str], None]) -> None:
        """See `DeviceGraphs.capture`."""
        if self._signature.has_shape_tensors:
            warn(f"Detected shape tensor, CUDA graph is not captured for {self._name}")
        else:
            super().capture(specs, warn)

    def _key(self, spec: GraphSpec) -> GraphKey | str:
        return graph_key(spec, self._signature, self._profile, self._batched)

    def _input_datatype(self, name: str) -> str:
        return self._signature.tensors[name].datatype

    def _capture(self, key: GraphKey, inputs: dict[str, DeviceArray]) -> tuple[Any, dict[str, DeviceArray]]:
        """The context must live as long as the graph."""
        cuda, stream = self._device.cuda, self._stream
        context = self._context()
        output_shapes = context.output_shapes(dict(key.shapes), {})
        dependent = [name for name, shape in output_shapes.items() if -1 in shape]
        if dependent or any(tensor.on_host for tensor in self._signature.outputs.values()):
            raise InternalError(f"the shape of output '{''.join(dependent[:1])}' depends on the inputs' values")
        outputs = {
            name: self._array(name, self._signature.tensors[name].datatype, shape)
            for name, shape in output_shapes.items()
        }
        for name, array in (*inputs.items(), *outputs.items()):
            context.set_address(name, array.address)
        # TensorRT allocates in the first execution with new shapes, which must not be captured.
        context.enqueue(self._stream_address)
        cuda.wait(stream, cuda.new_event(self._device.device_id))
        cuda.begin_capture(stream)
        try:
            context.enqueue(self._stream_address)
        except ServingError:
            self._abandon_capture()
            raise
        return (cuda.end_capture(stream), context), outputs

    def _abandon_capture(self) -> None:
        """End a capture in which a call has failed: the stream takes work again."""
        cuda = self._device.cuda
        try:
            cuda.destroy_graph(cuda.end_capture(self._stream))
        except CudaError as error:
            end_if_lost(error)

    def _context(self) -> EngineContext:
        strategy = self._tensorrt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise InternalError(f"unable to create TensorRT context: {self._tensorrt.log.take_errors()}")
        byte_size = int(self._engine.device_memory_size_v2)
        if self._activations is None:
            self._activations = self._device.allocate(max(byte_size, 1))
        profile, device = self._profile, self._device
        if profile.index:
            context.set_optimization_profile_async(profile.index, self._stream_address)
            device.cuda.wait(self._stream, device.cuda.new_event(device.device_id))
        context.set_device_memory(self._activations.address, self._activations.byte_size)
        blocks = OutputBlocks(device)  # it runs in its graph only, whose outputs have memory
        return EngineContext(self._tensorrt, context, self._signature, profile, device, blocks, self._name)

    def _launch(self, launched: Any) -> None:
        graph, _ = launched
        self._device.cuda.launch_graph(graph, self._stream)

    def close(self) -> None:
        """Free the graphs. Nothing may be enqueued with them."""
        for each in self._graphs:
            try:
                self._device.cuda.destroy_graph(each.launched[0])
            except CudaError as error:
                end_if_lost(error)
        super().close()
