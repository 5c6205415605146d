"""CUDA graphs of an ONNX model: ONNX Runtime captures them when the model is loaded, and launches them for batches.

ONNX Runtime records the addresses of inputs and outputs. It knows a graph by the number in the option `gpu_graph_id` of
a run, does not look at shapes and addresses again, and captures nothing in a run with -1
(onnxruntime_run_options_config_keys.h). A graph computes all outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.onnxruntime.device_session import bound_place
from backends.onnxruntime.session import ORT_ERRORS
from backends.worker.devices.device_graphs import DeviceGraphs
from backends.worker.devices.graph_specs import GraphKey, graph_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnxruntime as ort

    from backends.onnxruntime.signature import OnnxSignature
    from backends.worker.devices.graph_specs import GraphSpec
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.devices.tensors import DeviceArray

_CUDA = "cuda"


class OnnxGraphs(DeviceGraphs):
    """The graphs of a session."""

    failures = (*DeviceGraphs.failures, *ORT_ERRORS)

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: OnnxSignature,
        device: InstanceDevice,
        options: Callable[[int], ort.RunOptions],
        name: str,
        *,
        batched: bool,
    ) -> None:
        """`options` returns the options of a run with the graph of a number; -1 for none. `name` is the instance's."""
        super().__init__(device, device.stream, name)
        self._session = session
        self._signature = signature
        self._options = options
        self._batched = batched
        self._dims = {name: tensor.dims for name, tensor in signature.inputs.items()}

    def _key(self, spec: GraphSpec) -> GraphKey | str:
        shapes = graph_shapes(spec, self._dims, self._batched)
        return shapes if isinstance(shapes, str) else GraphKey(shapes, spec.batch_size, spec.lower_batch_size)

    def _input_datatype(self, name: str) -> str | None:
        return self._signature.inputs[name].datatype

    def _capture(self, key: GraphKey, inputs: dict[str, DeviceArray]) -> tuple[Any, dict[str, DeviceArray]]:
        binding = self._session.io_binding()
        for name, array in inputs.items():
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
        options = self._options(len(self) + 1)
        for _ in range(2):  # ONNX Runtime captures in the first or in the second run
            self._session.run_with_iobinding(binding, options)
            self._device.computes()
            self._device.synchronize()
        return (binding, options), outputs

    def _launch(self, launched: Any) -> None:
        self._session.run_with_iobinding(*launched)
