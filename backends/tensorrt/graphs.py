"""CUDA graphs of an instance: captured when the model is loaded, launched for batches of their shapes.

Each graph has an execution context of its own, because a graph is undefined once its context has other shapes. The
contexts share the memory of their activations, and all graphs share their inputs and outputs: an instance executes one
batch at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from backends.tensorrt.context import EngineContext, OutputBlocks
from backends.tensorrt.profiles import graph_key
from backends.worker.devices.graph_specs import GraphKey, best_graph, key_of_captured, outputs_of_batch
from backends.worker.devices.instance_device import DeviceBlock, end_if_lost
from backends.worker.devices.tensors import DeviceArray
from kernel.errors import InternalError, ServingError
from shm.cuda import CudaError
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.tensorrt.library import TensorRt
    from backends.tensorrt.signature import EngineSignature, Profile
    from backends.worker.devices.graph_specs import GraphSpec
    from backends.worker.devices.instance_device import InstanceDevice


class CapturedGraph(msgspec.Struct, frozen=True, eq=False):
    """A graph, and what it was captured with: its shapes and the addresses of its tensors."""

    key: GraphKey
    graph: Any
    #: Its execution context, which must live as long as the graph.
    context: EngineContext
    inputs: dict[str, DeviceBlock]
    outputs: dict[str, DeviceArray]


class CapturedGraphs:
    """The graphs of one optimization profile. Owns them."""

    def __init__(
        self,
        tensorrt: TensorRt,
        engine: Any,
        signature: EngineSignature,
        device: InstanceDevice,
        instance_name: str,
        stream: int,
    ) -> None:
        """`stream` is the address of the stream that executes."""
        self._tensorrt = tensorrt
        self._engine = engine
        self._signature = signature
        self._device = device
        self._name = instance_name
        self._stream = device.cuda.stream_of(stream)
        self._stream_address = stream
        self._graphs: list[CapturedGraph] = []
        self._keys: list[GraphKey] = []
        self._inputs: dict[str, DeviceBlock] = {}
        self._outputs = OutputBlocks(device)
        self._activations: DeviceBlock | None = None

    # ---- loading ---------------------------------------------------------------------------------

    def capture(self, specs: Sequence[GraphSpec], profile: Profile, batched: bool, warn: Callable[[str], None]) -> None:
        """Capture a graph for each specification that the profile supports. `warn` is called for each that fails.

        A model runs without graphs as well, so nothing is raised.
        """
        if self._signature.has_shape_tensors:
            warn(f"Detected shape tensor, CUDA graph is not captured for {self._name}")
            return
        keys: list[GraphKey] = []
        for spec in specs:
            found = graph_key(spec, self._signature, profile, batched)
            if isinstance(found, str):
                warn(f"unable to record CUDA graph for {self._name}, batch size {spec.batch_size}: {found}")
            elif any(found.shapes == key.shapes for key in keys):
                warn(
                    f"Detected duplicated CUDA graph specification for {self._name}, skipping the duplicated "
                    "specification"
                )
            else:
                keys.append(found)
        # The largest first: the blocks of outputs do not grow after that, and graphs keep their addresses.
        for key in sorted(keys, key=_element_total, reverse=True):
            try:
                self._capture(key, profile)
            except (ServingError, CudaError) as error:
                if isinstance(error, CudaError):
                    end_if_lost(error)
                warn(f"unable to record CUDA graph for {self._name}, shapes {dict(key.shapes)}: {error}")

    def _capture(self, key: GraphKey, profile: Profile) -> None:
        cuda, stream = self._device.cuda, self._stream
        context = self._context(profile)
        shapes = dict(key.shapes)
        output_shapes = context.output_shapes(shapes, {})
        dependent = [name for name, shape in output_shapes.items() if -1 in shape]
        if dependent or any(tensor.on_host for tensor in self._signature.outputs.values()):
            raise InternalError(f"the shape of output '{''.join(dependent[:1])}' depends on the inputs' values")
        inputs = {name: self._input_block(name, shape) for name, shape in shapes.items()}
        for name, block in inputs.items():
            context.set_address(name, block.address)
        outputs = {}
        for name, shape in output_shapes.items():
            datatype = self._signature.tensors[name].datatype
            block = self._outputs.block(name, element_count(shape) * DATATYPES[datatype].byte_size)
            outputs[name] = DeviceArray(block.address, datatype, shape, self._device.device_id, block)
            context.set_address(name, block.address)
        # TensorRT allocates in the first execution with new shapes, which must not be captured.
        context.enqueue(self._stream_address)
        cuda.wait(stream, cuda.new_event(self._device.device_id))
        cuda.begin_capture(stream)
        try:
            context.enqueue(self._stream_address)
        except ServingError:
            self._abandon_capture()
            raise
        graph = cuda.end_capture(stream)
        key = key_of_captured(key, outputs.values())
        self._keys.append(key)
        self._graphs.append(CapturedGraph(key, graph, context, inputs, outputs))

    def _abandon_capture(self) -> None:
        """End a capture in which a call has failed: the stream takes work again."""
        cuda = self._device.cuda
        try:
            cuda.destroy_graph(cuda.end_capture(self._stream))
        except CudaError as error:
            end_if_lost(error)

    def _context(self, profile: Profile) -> EngineContext:
        strategy = self._tensorrt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise InternalError(f"unable to create TensorRT context: {self._tensorrt.log.take_errors()}")
        byte_size = int(self._engine.device_memory_size_v2)
        if self._activations is None:
            self._activations = self._device.allocate(max(byte_size, 1))
        if profile.index:
            context.set_optimization_profile_async(profile.index, self._stream_address)
            self._device.cuda.wait(self._stream, self._device.cuda.new_event(self._device.device_id))
        context.set_device_memory(self._activations.address, self._activations.byte_size)
        return EngineContext(self._tensorrt, context, self._signature, profile, self._device, self._outputs, self._name)

    def _input_block(self, name: str, shape: tuple[int, ...]) -> DeviceBlock:
        """Return the block of an input, filled with zeros if it is new."""
        byte_size = element_count(shape) * DATATYPES[self._signature.tensors[name].datatype].byte_size
        found = self._inputs.get(name)
        if found is None or found.byte_size < byte_size:
            found = self._inputs[name] = self._device.allocate(max(byte_size, 1))
            self._device.cuda.enqueue_fill(found.address, found.byte_size, self._stream)
        return found

    # ---- executing -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, inputs: Mapping[str, DeviceArray]) -> dict[str, DeviceArray] | None:
        """Enqueue a batch with the graph for its shapes, and return its outputs; None if there is no such graph.

        The outputs are valid until the next run, when the stream has done what is enqueued. Raises `InternalError`.
        """
        shapes = tuple((name, inputs[name].shape) for name in sorted(inputs))
        position = best_graph(self._keys, shapes)
        if position is None:
            return None
        found = self._graphs[position]
        cuda = self._device.cuda
        try:
            for name, shape in found.key.shapes:
                array, target = inputs[name], found.inputs[name].address
                cuda.enqueue_copy(target, array.address, array.nbytes, self._stream)
                padding = array.nbytes * shape[0] // array.shape[0] - array.nbytes if array.nbytes else 0
                cuda.enqueue_fill(target + array.nbytes, padding, self._stream)
            cuda.launch_graph(found.graph, self._stream)
        except CudaError as error:
            end_if_lost(error)
            raise InternalError(f"unable to launch a CUDA graph for {self._name}: {error}") from None
        self._device.computes()
        self._device.keeps_outputs_in_order()
        return outputs_of_batch(found.key, inputs, found.outputs)

    def close(self) -> None:
        """Free the graphs. Nothing may be enqueued with them."""
        for each in self._graphs:
            try:
                self._device.cuda.destroy_graph(each.graph)
            except CudaError as error:
                end_if_lost(error)
        self._graphs.clear()
        self._keys.clear()


def _element_total(key: GraphKey) -> int:
    return sum(element_count(shape) for _, shape in key.shapes)
