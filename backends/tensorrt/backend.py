"""The TensorRT backend: completes configurations from engines, and loads and executes plans on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.base import ModelBackend
from backends.tensorrt.configuration import autofill, check_agreement
from backends.tensorrt.library import find_tensorrt
from backends.tensorrt.model import LoadedEngine
from backends.tensorrt.plan import load_plan, plan_file
from backends.tensorrt.settings import check_kind, engine_settings, runs_on_gpu
from backends.tensorrt.signature import signature_of
from kernel.errors import InternalError, ServingError, Unavailable
from shm.cuda import CudaError, CudaUnavailable, cuda

if TYPE_CHECKING:
    from backends.base import Config, Host, ModelArguments
    from backends.tensorrt.library import TensorRt
    from backends.tensorrt.plan import Plan
    from backends.tensorrt.signature import EngineSignature


class TensorRtBackend(ModelBackend):
    """Executes a TensorRT engine on a GPU."""

    device_inputs = True

    _model: LoadedEngine | None = None

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._tensorrt: TensorRt | None = None

    # ---- without an instance ---------------------------------------------------------------------

    def complete(self, arguments: ModelArguments) -> Config:
        """See `Backend.complete`. Loads the plan on the first GPU of the model, and frees it."""
        if not runs_on_gpu(arguments):
            return dict(arguments.config)  # as in Triton: the load fails with a clear text
        try:
            filled = autofill(arguments.config, self._examined(arguments))
        except InternalError as error:
            if not error.message.startswith("unable to create TensorRT"):
                raise
            raise InternalError(
                "unable to load plan file to auto complete config: "
                f"{plan_file(arguments, self._capability(arguments))}: {error.message}"
            ) from None
        if filled["max_batch_size"] != arguments.max_batch_size:
            self.host.log(
                "INFO",
                f"autofilled max_batch_size to {filled['max_batch_size']} for model '{arguments.model_name}', the most "
                "that its optimization profiles support",
            )
        return filled

    def verify(self, arguments: ModelArguments) -> None:
        """See `Backend.verify`. Loads the plan, and creates no context."""
        if runs_on_gpu(arguments):
            check_agreement(arguments.config, self._examined(arguments), arguments.model_name)

    def _examined(self, arguments: ModelArguments) -> EngineSignature:
        plan = self._plan(arguments, self._device_id(arguments))
        try:
            return signature_of(plan.engine)
        finally:
            plan.close()

    def _device_id(self, arguments: ModelArguments) -> int:
        """Return the GPU of an instance, or the first one that the configuration names."""
        if arguments.kind == "GPU" and arguments.instance_name:
            return arguments.device_id
        gpus = arguments.config.get("instance_group", [{}])[0].get("gpus", [])
        return int(gpus[0]) if gpus else 0

    def _capability(self, arguments: ModelArguments) -> tuple[int, int]:
        return cuda().properties(self._device_id(arguments)).capability

    def _plan(self, arguments: ModelArguments, device_id: int) -> Plan:
        """Load the plan for a device, which becomes the current one. Raises `ServingError`."""
        try:
            devices = cuda()
            devices.use(device_id)
            capability = devices.properties(device_id).capability
        except (CudaUnavailable, CudaError) as error:
            # Without a driver TensorRT ends the process: it must not be touched.
            raise Unavailable(f"unable to set CUDA device to GPU {device_id} : {error}") from None
        settings = engine_settings(arguments)
        if self._tensorrt is None:
            self._tensorrt = find_tensorrt(self.host.log)
            self._tensorrt.load_plugins(settings.plugins)
        return load_plan(
            self._tensorrt,
            plan_file(arguments, capability),
            model=arguments.model_name,
            host_code_allowed=settings.host_code_allowed,
            capability=capability,
        )

    # ---- an instance -----------------------------------------------------------------------------

    def load(self, arguments: ModelArguments) -> None:
        check_kind(arguments)
        device = self.host.device
        assert device is not None, "an instance on a GPU has a device"
        free_before = device.cuda.free_and_total(device.device_id)[0]
        plan = self._plan(arguments, device.device_id)
        assert self._tensorrt is not None
        try:
            signature = signature_of(plan.engine)
            check_agreement(arguments.config, signature, arguments.instance_name)
            settings = engine_settings(arguments)
            self._model = LoadedEngine(self._tensorrt, plan, signature, arguments, settings, device)
            self.overlaps_on_device = self._model.overlaps
            self._model.capture_graphs(arguments, lambda text: self.host.log("WARNING", text))
        except ServingError:
            self._model = None
            plan.close()
            raise
        except CudaError as error:
            self._model = None
            plan.close()
            raise InternalError(f"unable to load model '{arguments.model_name}': {error}") from None
        used = free_before - device.cuda.free_and_total(device.device_id)[0]
        self.host.report_memory([("GPU", device.device_id, max(used, 0))])
        if self._model.graph_count:
            self.host.log("INFO", f"captured {self._model.graph_count} CUDA graphs for {arguments.instance_name}")

    def finalize(self) -> None:
        """Free the engine and its memory."""
        if self._model is not None:
            self._model.close()
            self._model = None
