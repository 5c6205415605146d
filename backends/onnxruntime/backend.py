"""The ONNX Runtime backend: completes configurations from ONNX files, and loads and executes ONNX models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backends.base import Backend
from backends.onnxruntime.autofill import autofill, default_max_batch_size, is_complete
from backends.onnxruntime.binding import BoundSession
from backends.onnxruntime.check import check_agreement
from backends.onnxruntime.model import LoadedModel
from backends.onnxruntime.options import model_path, run_options
from backends.onnxruntime.providers import ignored_settings
from backends.onnxruntime.session import open_session
from backends.onnxruntime.signature import signature_of
from backends.worker.sequences.sequence_config import state_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnxruntime as ort

    from backends.base import Config, Host, ModelArguments, Timings
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.request import WorkerRequest


class OnnxRuntimeBackend(Backend):
    """Executes an ONNX model."""

    shares_worker = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._model: LoadedModel | None = None

    def complete(self, arguments: ModelArguments) -> Config:
        """See `Backend.complete`. Opens the model file unless the configuration is complete."""
        config = arguments.config
        if is_complete(config):
            self.host.log(
                "INFO",
                f"skipping model configuration auto-complete for '{arguments.model_name}': "
                "inputs and outputs already specified",
            )
            return dict(config)
        kinds = [group.get("kind") for group in config.get("instance_group", [])]
        if "KIND_GPU" in kinds:
            arguments = msgspec.structs.replace(arguments, kind="GPU")
        default_batch_size = default_max_batch_size(arguments.backend_config)
        filled = autofill(config, signature_of(open_session(arguments), model_path(arguments)), default_batch_size)
        if filled["max_batch_size"] != int(config.get("max_batch_size", 0)):
            self.host.log(
                "WARNING",
                f"autofilled max_batch_size to {filled['max_batch_size']} for model '{arguments.model_name}' "
                "since batching is supporrted but no max_batch_size is specified in model configuration. "
                "Must specify max_batch_size to utilize autofill with a larger max batch size. "
                f"In config.pbtxt this is: max_batch_size: {filled['max_batch_size']}",
            )
        for key in ("input", "output"):
            self._explain_reshapes(arguments.model_name, key, filled.get(key, []))
        return filled

    def _explain_reshapes(self, model: str, key: str, entries: Sequence[Config]) -> None:
        """Log which tensors clients see with one dimension more than the model has, which is Triton's rule."""
        for entry in entries:
            if entry.get("reshape") == {"shape": []}:
                self.host.log(
                    "INFO",
                    f"autofilled {key} '{entry['name']}' of model '{model}', which has one number for each row: "
                    f"clients see the shape [batch, 1]. In config.pbtxt this is: {key} [ {{ "
                    f'name: "{entry["name"]}" data_type: '
                    f"{entry['data_type']} dims: [ 1 ] reshape: {{ shape: [ ] }} }} ]",
                )

    def verify(self, arguments: ModelArguments) -> None:
        """See `Backend.verify`. Opens the model file, as `load` does."""
        check_agreement(arguments.config, signature_of(open_session(arguments), model_path(arguments)))

    def load(self, arguments: ModelArguments) -> None:
        """See `Backend.load`."""
        device = self.host.device
        if device is None:
            session = open_session(arguments)
            signature = signature_of(session, model_path(arguments))
            check_agreement(arguments.config, signature)
            bound = BoundSession(session, run_options(arguments), signature)
            self._model = LoadedModel(arguments.config, signature, bound)
        else:
            session = self._load_on(device, arguments)
        for line in ignored_settings(arguments, session.get_providers()):
            self.host.log("WARNING", line)

    def _load_on(self, device: InstanceDevice, arguments: ModelArguments) -> ort.InferenceSession:
        """Load the model onto the instance's GPU, and return its session. Raises `ServingError`."""
        # Instances on the CPU do without these modules, and their workers without the memory for them.
        from backends.onnxruntime.gpu.device_binding import DeviceSession
        from backends.onnxruntime.gpu.device_model import DeviceModel

        capability = device.cuda.properties(device.device_id).capability
        session = open_session(arguments, device.stream, capability)
        signature = signature_of(session, model_path(arguments, capability))
        check_agreement(arguments.config, signature)
        # The worker keeps implicit state on the host.
        states = [spec.name for spec in state_outputs(arguments.config)]
        bound = DeviceSession(session, run_options(arguments, on_stream=True), signature, device, states)
        self._model = DeviceModel(arguments.config, signature, bound, device)
        self.device_inputs = True
        return session

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """See `Backend.execute`."""
        assert self._model is not None, "execute before load"
        self._model.execute(requests, timings)

    def finalize(self) -> None:
        """Free the session's memory."""
        self._model = None
