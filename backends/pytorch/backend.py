"""The PyTorch backend: loads and executes TorchScript files, exported programs and AOTInductor's libraries."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from backends.base import ModelBackend
from backends.pytorch.conversion import TensorConversion
from backends.pytorch.library import TORCH_ERRORS, apply_settings, guard_of, load_torch
from backends.pytorch.model import TorchModel
from backends.pytorch.model_file import (
    CompiledRunner,
    ExportedRunner,
    FileFormat,
    TorchScriptRunner,
    find_model_file,
    read_format,
)
from backends.pytorch.naming import places
from backends.pytorch.settings import ignored_parameters, torch_settings
from kernel.errors import InternalError, Unsupported
from kernel.machine import limited_processor_count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from backends.base import Config, Host, ModelArguments, Timings
    from backends.pytorch.model_file import Runner
    from backends.worker.request import WorkerRequest


class PyTorchBackend(ModelBackend):
    """Executes a PyTorch model."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._torch: Any = None
        self._cleans_cache = False

    def gpu_obstacle(self, arguments: ModelArguments) -> str:
        """As `Backend.gpu_obstacle`: a PyTorch that was built for the CPU."""
        if load_torch().version.cuda is None:
            return "the installed torch was built for the CPU; on Linux, PyPI's wheels of torch are for GPUs"
        return ""

    def complete(self, arguments: ModelArguments) -> Config:
        """See `Backend.complete`. Nothing is filled in, as in Triton."""
        self.host.log(
            "WARNING",
            f"skipping model configuration auto-complete for '{arguments.model_name}': not supported for pytorch "
            "backend",
        )
        return dict(arguments.config)

    def verify(self, arguments: ModelArguments) -> None:
        """See `Backend.verify`. Loads the model on the CPU."""
        torch_settings(arguments)
        places(arguments.config, self._open(load_torch(), arguments).signature)

    def load(self, arguments: ModelArguments) -> None:
        settings = torch_settings(arguments, limited_processor_count())
        ignored = ignored_parameters(arguments)
        torch = self._torch = load_torch()
        apply_settings(torch, settings)
        device = self.host.device
        guard = guard_of(torch, settings)
        with guard():
            capability = None if device is None else device.cuda.properties(device.device_id).capability
            runner = self._open(torch, arguments, capability)
        found = places(arguments.config, runner.signature)
        conversion = TensorConversion(torch, copies_read_only=runner.changes_inputs)
        if device is None:
            self._model = TorchModel(arguments.config, runner, found, conversion, guard)
        else:
            from backends.pytorch.device_model import DeviceConversion, DeviceTorchModel  # few servers have GPUs

            on_device = DeviceConversion(torch, device, copies=runner.changes_inputs)
            self._model = DeviceTorchModel(arguments.config, runner, found, conversion, guard, on_device)
            self.device_inputs = True
            self.overlaps_on_device = True
        self._cleans_cache = settings.cache_cleaning and arguments.kind != "CPU"
        for line in (*ignored, *found.warnings):
            self.host.log("WARNING", line)

    def _open(self, torch: Any, arguments: ModelArguments, capability: tuple[int, int] | None = None) -> Runner:
        """Load the model file; `capability` is the compute capability of the instance's GPU. Raises `ServingError`."""
        path = find_model_file(arguments, capability)
        found = read_format(path, arguments.model_name)
        try:
            return _runner(torch, path, found, arguments)
        except pickle.UnpicklingError as error:
            raise Unsupported(
                f"failed to load model '{arguments.model_name}': '{path.name}' has a pickle of Python objects, and a "
                f"pickle runs code of its author. Export the program with tensors only. {' '.join(str(error).split())}"
            ) from error
        except TORCH_ERRORS as error:
            raise InternalError(f"failed to load model '{arguments.model_name}': {error}") from error

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        assert self._model is not None, "execute before load"
        self._model.execute(requests, timings)
        if self._cleans_cache:
            self._torch.cuda.empty_cache()


def _runner(torch: Any, path: Path, found: FileFormat, arguments: ModelArguments) -> Runner:
    device = {"CPU": "cpu", "GPU": f"cuda:{arguments.device_id}"}.get(arguments.kind)
    if found is FileFormat.TORCHSCRIPT:
        return TorchScriptRunner(torch, path, device)
    if found is FileFormat.EXPORTED:
        return ExportedRunner(torch, path, device if arguments.kind == "GPU" else None)
    if arguments.kind == "MODEL":
        raise Unsupported(
            f"model '{arguments.model_name}' was compiled by AOTInductor for one kind of device: its instances are of "
            "KIND_CPU or KIND_GPU"
        )
    return CompiledRunner(path, arguments.device_id if arguments.kind == "GPU" else -1)
