"""CUDA graphs of an ONNX model: ONNX Runtime captures them when the model is loaded, and launches them for batches.

ONNX Runtime records the addresses of inputs and outputs, so each graph has memory of its own for them; all graphs share
the memory of their inputs, and that of their outputs. It knows a graph by the number in the option `gpu_graph_id` of a
run, does not look at shapes and addresses again, and captures nothing in a run with -1
(onnxruntime_run_options_config_keys.h). A graph computes all outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from backends.onnxruntime.device_model import bound_place
from backends.onnxruntime.session import ORT_ERRORS
from backends.worker.devices.graph_specs import (
    GraphKey,
    best_graph,
    graph_shapes,
    key_of_captured,
    outputs_of_batch,
)
from backends.worker.devices.instance_device import DeviceBlock, end_if_lost
from backends.worker.devices.tensors import DeviceArray
from kernel.errors import InternalError, ServingError
from shm.cuda import CudaError
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import onnxruntime as ort

    from backends.onnxruntime.signature import OnnxSignature
    from backends.worker.devices.graph_specs import GraphSpec
    from backends.worker.devices.instance_device import InstanceDevice

_CUDA = "cuda"

_FAILURES: tuple[type[Exception], ...] = (ServingError, CudaError, *ORT_ERRORS)


class OnnxGraph(msgspec.Struct, frozen=True, eq=False):
    """A graph that ONNX Runtime has captured, and how it is launched."""

    key: GraphKey
    binding: Any
    options: Any
    inputs: dict[str, DeviceArray]
    outputs: dict[str, DeviceArray]


class OnnxGraphs:
    """The graphs of a session. Owns the memory of their inputs and outputs. Not thread-safe."""

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: OnnxSignature,
        device: InstanceDevice,
        options: Callable[[int], ort.RunOptions],
    ) -> None:
        """`options` returns those of a run with the graph of a number; -1 for none."""
        self._session = session
        self._signature = signature
        self._device = device
        self._options = options
        self._stream = device.cuda.stream_of(device.stream)
        self._graphs: list[OnnxGraph] = []
        self._keys: list[GraphKey] = []
        self._blocks: dict[str, DeviceBlock] = {}

    # ---- loading ---------------------------------------------------------------------------------

    def capture(self, specs: Sequence[GraphSpec], batched: bool, warn: Callable[[str], None]) -> None:
        """Capture a graph for each specification. `warn` is called for each that fails: the model runs without it."""
        keys: list[GraphKey] = []
        dims = {name: tensor.dims for name, tensor in self._signature.inputs.items()}
        for spec in specs:
            shapes = graph_shapes(spec, dims, batched)
            if isinstance(shapes, str):
                warn(f"no CUDA graph is captured for batch size {spec.batch_size}: {shapes}")
            elif all(shapes != key.shapes for key in keys):
                keys.append(GraphKey(shapes, spec.batch_size, spec.lower_batch_size))
        # The largest first: its blocks do for all others, so that no graph loses its memory to a larger one.
        keys.sort(key=lambda key: sum(element_count(shape) for _, shape in key.shapes), reverse=True)
        for key in keys:
            try:
                self._capture(key, number=len(self._graphs) + 1)
            except _FAILURES as error:
                if isinstance(error, CudaError):
                    end_if_lost(error)
                self._device.synchronize()  # ends the process if the device is lost
                warn(f"no CUDA graph is captured for shapes {dict(key.shapes)}: {error}")

    def _capture(self, key: GraphKey, number: int) -> None:
        inputs = {name: self._array(name, self._signature.inputs[name].datatype, shape) for name, shape in key.shapes}
        binding = self._session.io_binding()
        for name, array in inputs.items():
            self._device.cuda.enqueue_fill(array.address, array.nbytes, self._stream)
            binding.bind_input(name, *bound_place(array))
        for name in self._signature.outputs:
            binding.bind_output(name, _CUDA, self._device.device_id)
        self._session.run_with_iobinding(binding, self._options(-1))  # says the shapes of the outputs
        shapes = [tuple(value.shape()) for value in binding.get_outputs()]
        self._device.computes()
        self._device.synchronize()
        outputs = {
            name: self._array(name, tensor.datatype, shape)
            for (name, tensor), shape in zip(self._signature.outputs.items(), shapes, strict=True)
        }
        binding.clear_binding_outputs()
        for name, array in outputs.items():
            binding.bind_output(name, *bound_place(array))
        options = self._options(number)
        for _ in range(2):  # ONNX Runtime captures in the first or in the second run
            self._session.run_with_iobinding(binding, options)
            self._device.computes()
            self._device.synchronize()
        key = key_of_captured(key, outputs.values())
        self._keys.append(key)
        self._graphs.append(OnnxGraph(key, binding, options, inputs, outputs))

    def _array(self, name: str, datatype: str | None, shape: tuple[int, ...]) -> DeviceArray:
        """Return memory for a tensor, which all graphs share."""
        if datatype is None:
            raise InternalError(f"tensor '{name}' has a type that no client can send")
        byte_size = element_count(shape) * DATATYPES[datatype].byte_size
        found = self._blocks.get(name)
        if found is None or found.byte_size < byte_size:
            # Graphs that were captured with a smaller block keep it by their arrays.
            found = self._blocks[name] = self._device.allocate(max(byte_size, 1))
        return DeviceArray(found.address, datatype, shape, self._device.device_id, found)

    # ---- executing -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, DeviceArray] | None:
        """Enqueue a batch with the graph for its shapes, and return the outputs `names`; None if there is no graph.

        The outputs are valid until the next run. Raises ONNX Runtime's errors, and `InternalError`.
        """
        if not all(isinstance(array, DeviceArray) for array in inputs.values()):
            return None
        shapes = tuple((name, inputs[name].shape) for name in sorted(inputs))
        position = best_graph(self._keys, shapes)
        if position is None:
            return None
        found = self._graphs[position]
        cuda = self._device.cuda
        try:
            for name, target in found.inputs.items():
                given = inputs[name]
                cuda.enqueue_copy(target.address, given.address, given.nbytes, self._stream)
                cuda.enqueue_fill(target.address + given.nbytes, target.nbytes - given.nbytes, self._stream)
        except CudaError as error:
            end_if_lost(error)
            raise InternalError(f"the inputs of a CUDA graph cannot be copied: {error}") from None
        self._session.run_with_iobinding(found.binding, found.options)
        self._device.computes()
        self._device.keeps_outputs_in_order()
        return outputs_of_batch(found.key, inputs, {name: found.outputs[name] for name in names})
