"""The one model instance of this worker process: what requests, the logger and `get_model_dir` know of it.

A worker hosts one instance, and models call `pb_utils` functions without naming it; so it is a variable
of this module, set before the model's file is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.reshape import output_array, tensor_specs
from kernel.errors import Unsupported

if TYPE_CHECKING:
    from backends.base import Host, ModelArguments
    from backends.reshape import TensorShapes
    from backends.worker.request import OutputValue, WorkerRequest


class PythonInstance:
    """The facts about a model instance that are needed for every request."""

    __slots__ = (
        "decoupled",
        "host",
        "max_batch_size",
        "model_name",
        "model_version",
        "name",
        "output_names",
        "reshaped_inputs",
        "reshaped_outputs",
        "version_dir",
        "writable_inputs",
    )

    def __init__(self, arguments: ModelArguments, host: Host) -> None:
        """Raises `Unsupported` where a parameter of the configuration is neither yes nor no."""
        self.host = host
        self.name = arguments.instance_name
        self.model_name = arguments.model_name
        self.model_version = arguments.version
        self.version_dir = str(arguments.version_dir)
        self.max_batch_size = arguments.max_batch_size
        self.decoupled = arguments.decoupled
        self.output_names = frozenset(str(output["name"]) for output in arguments.config.get("output", ()))
        #: Tensors that the model sees in another shape than clients do.
        self.reshaped_inputs = _reshaped(arguments, "input")
        self.reshaped_outputs = _reshaped(arguments, "output")
        #: Whether the model gets copies of inputs that lie in a client's shared memory.
        self.writable_inputs = _flag(arguments, "writable_inputs", default=False)
        # All tensors are in CPU memory, which is what the default, yes, asks for.
        _flag(arguments, "FORCE_CPU_ONLY_INPUT_TENSORS", default=True)

    def reshape_inputs(self, request: WorkerRequest) -> None:
        """Give the inputs of `request` the shapes that the model sees."""
        for view in request.inputs:
            spec = self.reshaped_inputs.get(view.name)
            if spec is not None:
                view.shape = spec.model_shape(view.shape)

    def reshape_output(self, output: OutputValue) -> OutputValue:
        """Return `output` in the shape that clients see. Raises `InternalError` where it does not fit."""
        spec = self.reshaped_outputs.get(output.name)
        if spec is not None:
            output.array = output_array(output.array, spec)
        return output

    @property
    def failure_prefix(self) -> str:
        """What stands before the reason when a batch fails."""
        return f"Failed to process the request(s) for model '{self.name}', message: "


def _reshaped(arguments: ModelArguments, key: str) -> dict[str, TensorShapes]:
    # An incomplete configuration may lack what other tensors' specs are made of.
    entries = [entry for entry in arguments.config.get(key, ()) if entry.get("reshape") is not None]
    return tensor_specs({**arguments.config, key: entries}, key)


def _flag(arguments: ModelArguments, key: str, *, default: bool) -> bool:
    value = arguments.parameter(key)
    if value is None:
        return default
    if value not in ("yes", "no"):
        raise Unsupported(f"Incorrect value for {key}: {value}'")
    return value == "yes"


_current: PythonInstance | None = None


def set_current(instance: PythonInstance) -> None:
    global _current
    _current = instance


def current() -> PythonInstance:
    """Return the process's instance; RuntimeError outside of a worker with a model."""
    if _current is None:
        raise RuntimeError("triton_python_backend_utils works only inside a model that a server has loaded")
    return _current


def get_model_dir() -> str:
    """Return the version's folder, where the model's file is."""
    return current().version_dir
