"""Runs a session on memory of its GPU: inputs and outputs are bound where they are, and nothing is copied.

All of a run is enqueued on the stream of the instance, which the session was opened with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.onnxruntime.binding import decoded
from backends.onnxruntime.session import ORT_ERRORS, onnx_error
from backends.worker.devices.tensors import DeviceArray
from shm.arrays import NUMPY_TYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import onnxruntime as ort

    from backends.onnxruntime.graphs import OnnxGraphs
    from backends.onnxruntime.signature import OnnxSignature
    from backends.worker.devices.instance_device import InstanceDevice
    from shm.arrays import Array

#: onnx.TensorProto.BFLOAT16, which NumPy lacks.
_BFLOAT16 = 16


def bound_place(array: DeviceArray) -> tuple[str, int, Any, list[int], int]:
    """Return how a binding describes memory: device, its number, type of elements, shape, address."""
    element = _BFLOAT16 if array.datatype == "BF16" else NUMPY_TYPES[array.datatype].type
    return "cuda", array.device_id, element, list(array.shape), array.address


_CUDA = "cuda"


class DeviceSession:
    """Runs a session on the device of its instance. Not thread-safe. It has the methods of `BoundSession.run`."""

    on_cpu = False

    def __init__(
        self,
        session: ort.InferenceSession,
        run_options: ort.RunOptions | None,
        signature: OnnxSignature,
        device: InstanceDevice,
        on_host: Collection[str],
    ) -> None:
        """`on_host` are the names of outputs that are wanted on the host; strings are always there."""
        self._session = session
        self._run_options = run_options
        self._device = device
        self._binding = session.io_binding()
        self._datatypes = {name: str(tensor.datatype) for name, tensor in signature.outputs.items()}
        self._on_host = {*on_host, *(name for name, datatype in self._datatypes.items() if datatype == "BYTES")}
        #: None if the session captures no CUDA graphs.
        self.graphs: OnnxGraphs | None = None
        #: False after an output had another shape than the model file declares.
        self.accepts_destinations = True

    def run(
        self, inputs: Mapping[str, Any], names: Sequence[str], destinations: Mapping[str, DeviceArray]
    ) -> dict[str, Any]:
        """Enqueue the computation, and return the outputs called `names`: name → `DeviceArray`, or array on the host.

        Inputs are `DeviceArray`s, and object arrays of `bytes`. If `destinations` has memory for an output, in exactly
        its shape, the output is written there, and the same object is returned. Raises as `BoundSession.run`.
        """
        if self.graphs is not None and all(isinstance(value, DeviceArray) for value in inputs.values()):
            outputs = self._run_graph(self.graphs, inputs)
            if outputs is not None:
                return {name: outputs[name] for name in names}
        if not destinations:
            return self._run(inputs, names, destinations)
        try:
            return self._bound(inputs, names, destinations)
        except ORT_ERRORS:
            # As in `BoundSession`: the model file may declare wrong shapes of outputs.
            outputs = self._run(inputs, names, {})
            self.accepts_destinations = False
            return outputs

    def _run_graph(self, graphs: OnnxGraphs, inputs: Mapping[str, DeviceArray]) -> dict[str, DeviceArray] | None:
        self._device.keep(inputs)
        try:
            return graphs.run(inputs)
        except ORT_ERRORS as error:
            self._device.synchronize()  # as below
            raise onnx_error(error) from error

    def _run(
        self, inputs: Mapping[str, Any], names: Sequence[str], destinations: Mapping[str, DeviceArray]
    ) -> dict[str, Any]:
        try:
            return self._bound(inputs, names, destinations)
        except ORT_ERRORS as error:
            self._device.synchronize()  # ends the process if the device is lost
            raise onnx_error(error) from error

    def _bound(
        self, inputs: Mapping[str, Any], names: Sequence[str], destinations: Mapping[str, DeviceArray]
    ) -> dict[str, Any]:
        binding = self._binding
        self._device.keep(inputs)
        try:
            for name, value in inputs.items():
                if isinstance(value, DeviceArray):
                    binding.bind_input(name, *bound_place(value))
                else:
                    binding.bind_cpu_input(name, decoded(name, value))
            for name in names:
                if name in destinations:
                    binding.bind_output(name, *bound_place(destinations[name]))
                elif name in self._on_host:
                    binding.bind_output(name)
                else:
                    binding.bind_output(name, _CUDA, self._device.device_id)
            self._session.run_with_iobinding(binding, self._run_options)
            self._device.computes()
            values = dict(zip(names, binding.get_outputs(), strict=True))
        finally:
            # Bound memory belongs to requests; it may be reused after their responses.
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()
        if not self._on_host.isdisjoint(names):
            self._device.synchronize()  # copies to the host are only enqueued
        return {name: destinations.get(name) or self._output(name, value) for name, value in values.items()}

    def _output(self, name: str, value: ort.OrtValue) -> DeviceArray | Array:
        if name in self._on_host or value.device_name().lower() == "cpu":
            array: Array = value.numpy()
            return array
        # The value owns its memory, and lives as long as the array and its copies.
        return DeviceArray(value.data_ptr(), self._datatypes[name], value.shape(), self._device.device_id, value)
