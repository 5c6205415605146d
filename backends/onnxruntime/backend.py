"""The ONNX Runtime backend: completes configurations from ONNX files, and loads and executes ONNX models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backends.base import ModelBackend
from backends.onnxruntime.binding import BoundSession
from backends.onnxruntime.configuration import autofill, check_agreement, default_max_batch_size, is_complete
from backends.onnxruntime.model import LoadedModel
from backends.onnxruntime.options import graph_run_options, model_path, run_options
from backends.onnxruntime.providers import graph_obstacle, ignored_settings, wanted_graphs
from backends.onnxruntime.session import gpu_obstacle, open_session
from backends.onnxruntime.signature import left_out_text, signature_of
from backends.worker.sequence_config import state_outputs
from kernel.errors import InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnxruntime as ort

    from backends.base import Config, ModelArguments, PreparedBatch, Timings
    from backends.onnxruntime.graphs import OnnxGraphs
    from backends.onnxruntime.signature import OnnxSignature
    from backends.worker.devices.graph_specs import GraphSpec
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.request import WorkerRequest


class OnnxRuntimeBackend(ModelBackend):
    """Executes an ONNX model."""

    shares_worker = True
    #: Each instance has a session. `run_with_iobinding` releases the interpreter's lock, and so do waits for events.
    shares_worker_on_gpu = True

    _model: LoadedModel | None = None

    def gpu_obstacle(self, arguments: ModelArguments) -> str:
        """As `Backend.gpu_obstacle`: an onnxruntime for the CPU lacks the provider."""
        return gpu_obstacle()

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
        default_batch_size = default_max_batch_size(arguments.backend_config)
        filled = autofill(config, _signature_of_file(arguments), default_batch_size)
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
        device = self.host.device
        if device is None:
            session = open_session(arguments)
            signature = self._checked_signature(session, arguments)
            bound = BoundSession(session, run_options(arguments), signature)
            self._model = LoadedModel(arguments.config, signature, bound)
            self.pipelines = bound.on_cpu
        else:
            session = self._load_on(device, arguments)
        for line in ignored_settings(arguments, session.get_providers()):
            self.host.log("WARNING", line)

    def _checked_signature(
        self, session: ort.InferenceSession, arguments: ModelArguments, capability: tuple[int, int] | None = None
    ) -> OnnxSignature:
        """Return the signature of the model's file, which agrees with its configuration. Raises `ServingError`."""
        signature = signature_of(session, model_path(arguments, capability))
        # Of each instance group the first instance says it for all.
        if arguments.instance_name.endswith("_0") and (text := left_out_text(signature.left_out)):
            self.host.log("WARNING", f"model '{arguments.model_name}': {text}")
        check_agreement(arguments.config, signature)
        return signature

    def _load_on(self, device: InstanceDevice, arguments: ModelArguments) -> ort.InferenceSession:
        """Load the model onto the instance's GPU, and return its session. Raises `ServingError`."""
        # Instances on the CPU do without this module, and their workers without the memory for them.
        from backends.onnxruntime.device_session import DeviceSession

        capability = device.cuda.properties(device.device_id).capability
        session, specs = self._open_on(device, arguments, capability)
        signature = self._checked_signature(session, arguments, capability)
        # The worker keeps implicit state on the host.
        states = [spec.name for spec in state_outputs(arguments.config)]
        options = graph_run_options(arguments, -1) if specs else run_options(arguments, on_stream=True)
        bound = DeviceSession(session, options, signature, device, states)
        if specs:
            bound.graphs = self._captured(session, signature, device, arguments, specs)
        self._model = LoadedModel(arguments.config, signature, bound, device)
        self.device_inputs = True
        # Outputs on the host are waited for in the run.
        self.overlaps_on_device = not states
        return session

    def _open_on(
        self, device: InstanceDevice, arguments: ModelArguments, capability: tuple[int, int]
    ) -> tuple[ort.InferenceSession, list[GraphSpec]]:
        """Return a session, and the CUDA graphs that it can capture. Raises as `open_session`."""
        specs, required = wanted_graphs(arguments)
        if specs and (obstacle := graph_obstacle(arguments.config)):
            self._without_graphs(arguments, obstacle)
            specs = []
        if specs:
            try:
                return open_session(arguments, device.stream, capability, graphs=True), specs
            except InternalError as error:  # ONNX Runtime refuses models with nodes on the CPU, for example
                if required:
                    raise
                self._without_graphs(arguments, error.message)
        return open_session(arguments, device.stream, capability), []

    def _without_graphs(self, arguments: ModelArguments, reason: str) -> None:
        self.host.log("WARNING", f"model '{arguments.model_name}' runs without CUDA graphs: {reason}")

    def _captured(
        self,
        session: ort.InferenceSession,
        signature: OnnxSignature,
        device: InstanceDevice,
        arguments: ModelArguments,
        specs: Sequence[GraphSpec],
    ) -> OnnxGraphs:
        from backends.onnxruntime.graphs import OnnxGraphs  # as `_load_on`
        from backends.worker.devices.graph_specs import has_ignored_lower_bounds

        def warn(text: str) -> None:
            self.host.log("WARNING", f"model '{arguments.model_name}': {text}")

        if has_ignored_lower_bounds(specs):
            warn("graph_lower_bound is used for the batch size only: other dimensions must be as in the graph")
        graphs = OnnxGraphs(
            session, signature, device, lambda number: graph_run_options(arguments, number), arguments.instance_name,
            batched=arguments.max_batch_size > 0,
        )  # fmt: skip
        graphs.capture(specs, warn)
        self.host.log("VERBOSE", f"captured {len(graphs)} CUDA graphs for {arguments.instance_name}")
        return graphs

    def prepare(self, requests: Sequence[WorkerRequest], timings: Timings) -> PreparedBatch | None:
        assert self._model is not None, "prepare before load"
        try:
            return self._model.prepare(requests, timings)
        except ServingError:
            return None  # `execute` raises it, or executes each request alone


def _signature_of_file(arguments: ModelArguments) -> OnnxSignature:
    """Return the tensors of the model file. It is read on the CPU, so that the process that completes a configuration
    takes no memory of a GPU; only where it has nodes that the CPU cannot compute, on the first GPU of the model."""
    try:
        return signature_of(open_session(arguments, only_signature=True), model_path(arguments))
    except InternalError:
        groups = arguments.config.get("instance_group", [])
        on_gpu = [group for group in groups if group.get("kind") == "KIND_GPU"]
        if not on_gpu:
            raise
        device_id = next((int(gpu) for group in on_gpu for gpu in group.get("gpus", [])), 0)
        arguments = msgspec.structs.replace(arguments, kind="GPU", device_id=device_id)
        return signature_of(open_session(arguments, only_signature=True), model_path(arguments))
