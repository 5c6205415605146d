"""A loaded ONNX model on a GPU: its batches are gathered there, and its outputs stay there until they are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.batch_input import batch_input_arrays
from backends.gather import gather
from backends.onnxruntime.model import LoadedModel
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Config
    from backends.onnxruntime.gpu.device_binding import DeviceSession
    from backends.onnxruntime.signature import OnnxSignature
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.request import WorkerRequest


class DeviceModel(LoadedModel):
    """A session on the device of its instance, with the tensors of the model's configuration."""

    def __init__(
        self, config: Config, signature: OnnxSignature, session: DeviceSession, device: InstanceDevice
    ) -> None:
        super().__init__(config, signature, session)
        self._device = device
        self._string_inputs = {name: spec for name, spec in self._inputs.items() if spec.datatype == "BYTES"}
        self._datatypes = {name: each.datatype for each in self._batch_inputs for name in each.target_names}

    def _gathered(self, requests: Sequence[WorkerRequest]) -> dict[str, Any]:
        computed = None
        if self._batch_inputs:
            arrays = batch_input_arrays(self._batch_inputs, requests)
            computed = {name: (self._datatypes[name], array) for name, array in arrays.items()}
        inputs: dict[str, Any] = dict(self._device.gather(requests, self._inputs, computed=computed))
        if self._string_inputs:
            arrays = gather(requests, self._inputs)
            inputs.update((name, array) for name, array in arrays.items() if name in self._string_inputs)
        return inputs

    def _destination(self, request: WorkerRequest, name: str, shape: Sequence[int]) -> Any:
        if not element_count(shape):
            return None
        return self._device.reserve(request, name, self._outputs[name].datatype, shape)
