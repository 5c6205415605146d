"""The one model instance of this worker process, for requests, the logger and `get_model_dir`.

Models call `pb_utils` functions without an argument for the instance. So the instance is a variable of this module; the
backend sets it before it imports the model's file.

Compares the first outputs of a model with its configuration, so that the log can say what does not fit. Pure.

As Triton, the server sends outputs as the model made them, and leaves out those that the configuration does not have.
Then clients get what the metadata does not promise, or miss an output, and no error says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.python import tensors
from backends.python.tensors import Tensor
from backends.reshape import output_array, tensor_specs
from backends.worker.sequence_config import sequence_batching_of, state_outputs
from kernel.errors import Unsupported
from shm.datatypes import BY_CONFIG_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from backends.base import Host, ModelArguments
    from backends.python.requests import PreferredMemory
    from backends.reshape import TensorShapes
    from backends.worker.model_calls import ModelCall
    from backends.worker.request import OutputValue, WorkerRequest
    from shm.tensor import Tensor as ReceivedTensor

#: How many responses with outputs are compared. A model that is wrong is wrong at once; later responses cost nothing.
COMPARED_COUNT = 16

_NAMES = {number: name for name, number in tensors.NUMBERS.items()}


class OutputCheck:
    """What the configuration says of the outputs, and which of them were reported."""

    __slots__ = ("_configured", "_left", "_names", "_reported", "_rows")

    def __init__(self, config: Mapping[str, Any], names: AbstractSet[str]) -> None:
        """`names` are the names of all outputs that the configuration has, states included."""
        self._configured = {str(output["name"]): output for output in config.get("output", ())}
        self._names = names
        #: The batch dimension, if the model batches.
        self._rows = [-1] if int(config.get("max_batch_size", 0)) > 0 else []
        self._reported: set[str] = set()
        self._left = COMPARED_COUNT

    @property
    def done(self) -> bool:
        """Whether no more responses need to be compared."""
        return self._left <= 0

    def warnings(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return a line for each tensor of a response that does not fit and was not reported before."""
        self._left -= bool(tensors)
        found = []
        for tensor in tensors:
            name = tensor.name()
            if name not in self._reported and (line := self._warning(name, tensor)):
                self._reported.add(name)
                found.append(line)
        return found

    def _warning(self, name: str, tensor: Tensor) -> str:
        if name not in self._names:
            there = ", ".join(f"'{each}'" for each in sorted(self._names)) or "none"
            return (
                f"output '{name}' is not in the configuration, which has {there}: no client gets it; add it "
                "to 'output' in config.pbtxt, or do not send it"
            )
        expected = self._configured.get(name, {})
        known = BY_CONFIG_NAME.get(str(expected.get("data_type", "")))
        if known is None:
            return ""
        datatype, sent = known.name, _NAMES[tensor.triton_dtype()]
        if datatype != sent:
            return (
                f"output '{name}' is {sent}, but its configuration and metadata say {datatype}: clients get "
                f"{sent}; change the model, or data_type in config.pbtxt"
            )
        dims = [*self._rows, *(int(dim) for dim in expected.get("dims", ()))]
        shape = tensor.shape()
        fits = len(dims) == len(shape) and all(dim in (-1, size) for dim, size in zip(dims, shape))
        if expected.get("reshape") is None and not fits:
            return (
                f"output '{name}' has shape {shape}, but its configuration and metadata say {dims}: clients "
                f"get {shape}; change the model, or dims in config.pbtxt"
            )
        return ""


class PythonInstance:
    """The properties of a model instance that every request needs."""

    __slots__ = (
        "call_discarder",
        "decoupled",
        "host",
        "inputs_stay",
        "iterative",
        "max_batch_size",
        "may_call",
        "model_name",
        "model_version",
        "name",
        "output_check",
        "output_names",
        "received",
        "reshaped_inputs",
        "reshaped_outputs",
        "results",
        "usual_outputs",
        "version_dir",
        "writable_inputs",
    )

    def __init__(self, arguments: ModelArguments, host: Host) -> None:
        """Raises `Unsupported` if a yes/no parameter of the configuration has another value."""
        self.host = host
        #: Whether the model may call other models: after `initialize` and before `finalize` (Triton).
        self.may_call = False
        #: Returns a function for the garbage collector: it lets a call continue whose responses the model has dropped.
        self.call_discarder: Callable[[], Callable[[ModelCall], None]] = lambda: lambda call: None
        self.name = arguments.instance_name
        self.model_name = arguments.model_name
        self.model_version = arguments.version
        self.version_dir = str(arguments.version_dir)
        self.max_batch_size = arguments.max_batch_size
        self.decoupled = arguments.decoupled
        names = [str(output["name"]) for output in arguments.config.get("output", ())]
        self.output_names = frozenset(names + [spec.name for spec in state_outputs(arguments.config)])
        #: Whether the model may reschedule requests.
        batching = sequence_batching_of(arguments.config) or {}
        self.iterative = bool(batching.get("iterative_sequence", False))
        #: Tensors with `reshape`: name → shapes.
        self.reshaped_inputs = _reshaped(arguments, "input")
        self.reshaped_outputs = _reshaped(arguments, "output")
        #: Compares the first responses with the configuration.
        self.output_check = OutputCheck(arguments.config, self.output_names)
        #: Whether the outputs of responses are sent without a call of `prepare_outputs`.
        self.usual_outputs = False
        #: Inputs in a client's shared memory are copied, so that the model can write to them.
        self.writable_inputs = _flag(arguments, "writable_inputs", default=False)
        #: Whether inputs that clients have on a GPU stay there. Only for instances on a GPU.
        self.inputs_stay = not _flag(arguments, "FORCE_CPU_ONLY_INPUT_TENSORS", default=True)
        #: Makes the tensors of inputs; another function in an instance on a GPU.
        self.received: Callable[[Sequence[ReceivedTensor], bool], list[Tensor]] = Tensor.received
        #: Makes the tensors of results of calls, where the model prefers them; as above.
        self.results: Callable[[Sequence[ReceivedTensor], bool, PreferredMemory | None], list[Tensor]] = _on_host

    def reshape_inputs(self, request: WorkerRequest) -> None:
        """Change the shapes of the request's inputs from the client's to the model's."""
        for view in request.inputs:
            spec = self.reshaped_inputs.get(view.name)
            if spec is not None:
                view.shape = spec.model_shape(view.shape)

    def prepare_outputs(self, tensors: Sequence[Tensor], outputs: list[OutputValue]) -> list[OutputValue]:
        """Return `outputs`, made from `tensors` of a response, in the shapes that clients see.

        Logs what does not fit the configuration. Raises `InternalError` if the shape of one with `reshape` is wrong.
        """
        check = self.output_check
        if not check.done:
            for line in check.warnings(tensors):
                self.host.log("WARNING", line)
            self.usual_outputs = check.done and not self.reshaped_outputs
        return [self._reshape_output(output) for output in outputs] if self.reshaped_outputs else outputs

    def _reshape_output(self, output: OutputValue) -> OutputValue:
        spec = self.reshaped_outputs.get(output.name)
        if spec is not None:
            output.array = output_array(output.array, spec)
        return output

    @property
    def failure_prefix(self) -> str:
        """Triton's text before the reason of a failed batch."""
        return f"Failed to process the request(s) for model '{self.name}', message: "


def _reshaped(arguments: ModelArguments, key: str) -> dict[str, TensorShapes]:
    # In an incomplete configuration tensors may have no datatype yet.
    entries = [
        entry
        for entry in arguments.config.get(key, ())
        if entry.get("reshape") is not None and entry.get("data_type") in BY_CONFIG_NAME
    ]
    return tensor_specs({**arguments.config, key: entries}, key)


def _flag(arguments: ModelArguments, key: str, *, default: bool) -> bool:
    value = arguments.parameter(key)
    if value is None:
        return default
    if value not in ("yes", "no"):
        raise Unsupported(f"Incorrect value for {key}: {value}'")
    return value == "yes"


def _on_host(views: Sequence[ReceivedTensor], writable: bool, preferred: PreferredMemory | None) -> list[Tensor]:
    return Tensor.received(views, writable)


_current: PythonInstance | None = None


def set_current_instance(instance: PythonInstance | None) -> None:
    global _current
    _current = instance


def forget_instance(instance: PythonInstance | None) -> None:
    """The model of `instance` leaves. Otherwise its memory would stay until another model executes."""
    if _current is instance:
        set_current_instance(None)


def current_instance() -> PythonInstance:
    """Return the instance of this process. Raises `RuntimeError` outside a worker with a model."""
    if _current is None:
        raise RuntimeError("triton_python_backend_utils works only inside a model that a server has loaded")
    return _current


def get_model_dir() -> str:
    """Return the version's folder, where the model's file is."""
    return current_instance().version_dir
