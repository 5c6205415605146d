"""The interface between a worker process and the code that executes a kind of model. docs/backends.md is its guide.

A backend is one class, `Backend`, or three classes for the seven steps of its life, `CustomBackend`, `CustomModel` and
`CustomInstance`. A worker has one backend object for its one model instance. It calls the methods of `Backend` from its
main thread, in this order: `complete` (only in the first worker of a model), `load`, any number of `execute`,
`finalize`. A worker that only examines a model calls `complete` and `verify`.
"""

from __future__ import annotations

import abc
import time
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from backends.worker.custom_metrics import MetricRegistry
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.model_calls import ModelCalls
    from backends.worker.request import WorkerRequest
    from kernel.errors import ServingError

Config = dict[str, Any]


class ModelArguments(msgspec.Struct, frozen=True):
    """The model instance of a backend."""

    #: The model's configuration, as the JSON of `/config`.
    config: Config
    #: The model's folder in the repository. It has one folder per version.
    model_dir: Path
    #: The version to load, which is the name of a folder in `model_dir`.
    version: int
    #: Empty in `complete`, which runs before the instances are known; kind and device have their defaults then.
    instance_name: str = ""
    #: CPU, GPU or MODEL.
    kind: str = "CPU"
    #: Number of the GPU.
    device_id: int = 0
    #: Settings of the backend from the command line (--backend-config): name → value.
    backend_config: dict[str, str] = {}
    #: The file with the code that runs the model, if that is not in the version's folder (Python-based backends).
    code_file: Path | None = None

    @property
    def model_name(self) -> str:
        """The name by which clients know the model."""
        return str(self.config["name"])

    @property
    def version_dir(self) -> Path:
        """The folder of the version, with the model file."""
        return self.model_dir / str(self.version)

    @property
    def max_batch_size(self) -> int:
        """The most rows of a batch; 0 if the model does not batch."""
        return int(self.config.get("max_batch_size", 0))

    @property
    def decoupled(self) -> bool:
        """Whether a request may have any number of responses."""
        return bool(self.config.get("model_transaction_policy", {}).get("decoupled", False))

    def parameter(self, key: str) -> str | None:
        """Return the value of `parameters[key]` in the model's configuration, or None."""
        found = self.config.get("parameters", {}).get(key)
        return None if found is None else str(found.get("string_value", ""))

    def integer_parameter(self, key: str, default: int = 0) -> int:
        """Return `parameter(key)` as a number. Raises `InvalidArgument` with Triton's text."""
        value = self.parameter(key)
        return default if value is None else as_integer(value)

    def boolean_parameter(self, key: str, default: bool) -> bool:
        """Return `parameter(key)` as a truth value. Raises `InvalidArgument` with Triton's text."""
        value = self.parameter(key)
        return default if value is None else as_boolean(value)

    def model_file(self, default: str, capability: tuple[int, int] | None = None) -> Path:
        """Return the path of the model file in the version's folder: `default_model_filename`, or `default`.

        For a Python-based backend it is `code_file`; on a GPU of this compute `capability` the file that
        `cc_model_filenames` has for it.
        """
        if self.code_file is not None:
            return self.code_file
        if capability is not None:
            named = self.config.get("cc_model_filenames", {}).get("{}.{}".format(*capability))
            if named:
                return self.version_dir / str(named)
        return self.version_dir / (self.config.get("default_model_filename") or default)


def as_integer(value: str) -> int:
    """Return the number of a setting. Raises `InvalidArgument` with Triton's text."""
    try:
        return int(value)
    except ValueError:
        raise InvalidArgument(f"failed to convert '{value}' to integral number") from None


def as_boolean(value: str, where: str = "") -> bool:
    """Return the truth value of a setting. Raises `InvalidArgument` with Triton's text, and `where` behind it."""
    if value.lower() not in ("true", "on", "1", "false", "off", "0"):
        raise InvalidArgument(f"failed to convert '{value}' to boolean{where}")
    return value.lower() in ("true", "on", "1")


class Host(Protocol):
    """The services of the worker for its backend. Any thread may use them."""

    def log(self, level: str, text: str) -> None:
        """Write one line to the server's log; `level` is INFO, WARNING, ERROR or VERBOSE."""

    @property
    def metrics(self) -> MetricRegistry:
        """The metrics that the model defines."""

    def report_memory(self, uses: Sequence[tuple[str, int, int]]) -> None:
        """Report the memory that the instance uses now: for each kind (CPU, CPU_PINNED, GPU) and number of a device
        the bytes. The statistics and /metrics show it. The newest report counts. Raises `InternalError`.
        """

    @property
    def calls(self) -> ModelCalls:
        """Calls of other models, and control of models."""

    @property
    def device(self) -> InstanceDevice | None:
        """The GPU of the instance, from `Backend.load` on; None for an instance that is not on a GPU.

        `OutputValue.array` may be a `DeviceArray` of it: respond as soon as all that writes it is enqueued on
        `device.stream`. The worker waits for the stream before it sends the responses.
        """


class Timings(msgspec.Struct):
    """The three stages of one `execute`: input, inference, output. The statistics show their durations.

    Times are monotonic nanoseconds. All are the start time at first. If the end of the inference is not marked, it is
    the end of `execute`: all of the time is inference then, or all after `inputs_ready`.
    """

    #: When the worker has begun with the batch.
    start_ns: int
    #: When the inputs were complete: the model computes from then on.
    inputs_ready_ns: int
    #: When the model has computed its outputs.
    inferred_ns: int
    clock: Callable[[], int] = time.monotonic_ns
    #: What `report_batch` was given. None if the backend does not report executions.
    executions: list[tuple[int, tuple[int, int, int, int]]] | None = None

    def inputs_ready(self) -> None:
        """End the input stage: the model begins to compute now."""
        self.inputs_ready_ns = self.inferred_ns = self.clock()

    def inferred(self) -> None:
        """End the inference stage: the model has computed its outputs."""
        self.inferred_ns = self.clock()

    def report_batch(self, rows: int, start_ns: int, inputs_ready_ns: int, inferred_ns: int, end_ns: int) -> None:
        """Report an execution of `rows` rows, in `execute`; several, if the batch was executed in parts.

        What is reported stands in the batch statistics instead of the measured times. Times are monotonic nanoseconds.
        """
        self.executions = self.executions or []
        self.executions.append((rows, (start_ns, inputs_ready_ns, inferred_ns, end_ns)))


class PreparedBatch(abc.ABC):
    """A batch whose inputs a backend has gathered, and which is ready to be computed. See `Backend.prepare`."""

    @abc.abstractmethod
    def run(self) -> None:
        """Compute the outputs, and mark the stages of the timings. Called once, in a thread that computes one batch at
        a time. It must not respond. Most of the time it should not have the interpreter's lock, because the worker's
        main thread works meanwhile. An exception fails the requests, as one of `Backend.execute`."""

    @abc.abstractmethod
    def respond(self) -> None:
        """Send each request its final response. Called once, in the main thread, after `run` has returned. The next
        batch may be computed meanwhile. An exception is as one of `run`."""


class Backend(abc.ABC):
    """One model instance in its worker process. `backends.builtin.identity` is an example."""

    #: Whether the backend may respond after `execute` has returned. Otherwise the worker fails each request that has
    #: no final response then.
    responds_later: ClassVar[bool] = False

    #: Whether instances of several models may be in one process (parameter `naiad.worker`). They execute in turn, each
    #: in a thread of its own that is not the main thread.
    shares_worker: ClassVar[bool] = False

    #: Whether this holds for instances on a GPU, too. They do not execute in turn, but each when it has a batch: what
    #: `execute` calls must release the interpreter's lock while it computes or waits, and use nothing that instances
    #: share.
    shares_worker_on_gpu: ClassVar[bool] = False

    #: Whether an instance on a GPU takes inputs in memory of a device: in `WorkerRequest.inputs` may be `DeviceInput`
    #: (`backends/worker/devices/tensors.py`) in place of `Tensor`. Otherwise they are copied to the host. An object may
    #: decide it in `load`.
    device_inputs: bool = False
    #: Whether the device of an instance on a GPU is opened when a tensor needs it, and not before `load`: code of the
    #: model may compute on the CPU only.
    opens_device_late: bool = False
    #: Whether the next batch on a GPU may be enqueued while one is computed: `execute` only enqueues, takes inputs from
    #: `InstanceDevice.gather`, and leaves outputs unchanged while the next batch is computed, or calls
    #: `InstanceDevice.keeps_outputs_in_order`. An object may decide it in `load`.
    overlaps_on_device: bool = False
    #: Whether `complete` has called code of the model. Then another process loads the model, without what this code
    #: has left behind, unless the model shares its process.
    completed_by_model: bool = False
    #: Whether `prepare` works: the worker may read and gather the next batch while one is computed, and respond to the
    #: last one. An object may decide it in `load`.
    pipelines: bool = False

    def __init__(self, host: Host) -> None:
        self.host = host

    def enter_turn(self) -> None:  # noqa: B027 - most backends change nothing
        """In a process of several models: this model executes from now on, after another one."""

    def leave_turn(self) -> None:  # noqa: B027 - as above
        """In a process of several models: another model executes from now on."""

    def complete(self, arguments: ModelArguments) -> Config:
        """Return a new configuration with missing fields filled in from the model file. Must not change `arguments`.

        The server adopts max_batch_size, input, output, model_transaction_policy, and dynamic_batching if the model
        has no scheduler; it ignores other changes. Raises `ServingError` if configuration and file contradict each
        other.
        """
        return dict(arguments.config)

    def gpu_obstacle(self, arguments: ModelArguments) -> str:
        """Return why no model of this backend can compute on a GPU as it is installed; "" if it can.

        It is asked once, for the first model of the backend without a kind (KIND_AUTO), where the server has a GPU.
        With a reason such models run on the CPU, and the log has the reason. It must not make a CUDA context.
        """
        return ""

    def verify(self, arguments: ModelArguments) -> None:  # noqa: B027 - most backends cannot tell
        """Check that the model's files fit its complete configuration, without loading the model.

        `naiad models` calls it after `complete`. Raises `ServingError` if the model could not be loaded, or
        if requests would fail.
        """

    def load(self, arguments: ModelArguments) -> None:  # noqa: B027 - not every backend has something to load
        """Load the model. An exception fails the load, and is the reason why the model is UNAVAILABLE.

        A `ServingError` keeps its code and text; any other exception has the code INTERNAL.
        """

    @abc.abstractmethod
    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Execute the requests as one batch, and send each one exactly one final response.

        The inputs of a request are `request.inputs`. The kernel has checked names, datatypes and shapes. If the model
        batches, shapes begin with the batch dimension, and all requests together have at most `max_batch_size` rows.
        An input of a client's region (`in_memory_of_client`) is read-only, and the client may change it after the final
        response. The memory of other inputs is not reused while an array of it exists. Responses are sent with
        `WorkerRequest.respond`, `fail` or `finish`, from any thread; after `execute` has returned only if
        `responds_later`.

        An exception fails every request without a final response: a `ServingError` with its code and text, any other
        exception with the code INTERNAL.
        """

    @property
    def executor(self) -> Callable[[Sequence[WorkerRequest], Timings], None]:
        """What the worker calls for each batch, from the end of `load` on: `execute`, or what that would call."""
        return self.execute

    def prepare(self, requests: Sequence[WorkerRequest], timings: Timings) -> PreparedBatch | None:
        """Gather the inputs of the requests as one batch, to be computed after the one that is computed now.

        Only for a backend that `pipelines`. The worker calls it in place of `execute` while requests wait for a slow
        model. Returns None for a batch that only `execute` can execute, or that fails: the worker calls `execute` then,
        when nothing is computed. Must not respond.
        """
        raise NotImplementedError(f"{type(self).__name__} pipelines and has no method `prepare`")

    @property
    def concurrency(self) -> int:
        """How many batches the loaded instance executes at the same time. Above 1 the worker calls `begin` instead of
        `execute`."""
        return 1

    def begin(
        self, requests: list[WorkerRequest], timings: Timings, ended: Callable[[ServingError | None], None]
    ) -> None:
        """Begin to execute the requests as one batch, and return soon; other batches may be in execution.

        Requests and responses are as in `execute`. An exception is not raised: `ended` is called once, with it or with
        None, from any thread, when no code of the backend uses the inputs any more. This must not raise.
        """
        raise NotImplementedError(f"{type(self).__name__} has a concurrency above 1 and no method `begin`")

    @property
    def checks_health(self) -> bool:
        """Whether the loaded model can say whether it is healthy: `check_health` works."""
        return False

    def check_health(self, done: Callable[[str], None]) -> None:
        """Find out whether the model is healthy, and call `done` once, from any thread: with an empty text, or with
        the reason why it is not. Called between batches. Must not raise."""
        raise NotImplementedError(f"{type(self).__name__} checks its health and has no method `check_health`")

    def finalize(self) -> None:  # noqa: B027 - most backends have nothing to free
        """Free the model before the worker ends. Not called if the worker is killed."""


class CustomModel:
    """Steps 2 and 6: the model, before and after its instance."""

    def __init__(self, backend: CustomBackend, arguments: ModelArguments) -> None:
        self.backend = backend
        #: In `complete` without the fields of the instance.
        self.arguments = arguments

    def complete(self) -> Config:
        """Return the configuration with missing fields filled in, as `Backend.complete`. Called before step 2, by the
        first worker of a model."""
        return dict(self.arguments.config)

    def initialize(self) -> None:
        """Step 2: check the configuration, read the model. An exception fails the load, as in `Backend.load`."""

    def finalize(self) -> None:
        """Step 6: free the model."""


class CustomInstance(abc.ABC):
    """Steps 3, 4 and 5: the instance that executes."""

    #: As in `Backend`, where an instance decides it, in `initialize` for example; None for what the backend says.
    device_inputs: bool | None = None

    def __init__(self, model: CustomModel, host: Host) -> None:
        self.model = model
        self.arguments = model.arguments
        self.host = host

    def initialize(self) -> None:  # noqa: B027 - not every instance needs it
        """Step 3: get ready to execute. An exception fails the load, as in `Backend.load`."""

    @abc.abstractmethod
    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Step 4, any number of times: as `Backend.execute`."""

    def finalize(self) -> None:  # noqa: B027 - as above
        """Step 5: free what the instance has."""


class CustomBackend:
    """Steps 1 and 7 of a backend's life: what its models share in a process. The subclass names the other classes.

    A worker process has one object of it, also if it has several models (`shares_worker`).
    """

    #: The class of the backend's model instances.
    instance_class: ClassVar[type[CustomInstance]]
    #: The class of its models, if they need steps of their own.
    model_class: ClassVar[type[CustomModel]] = CustomModel

    #: As in `Backend`.
    responds_later: ClassVar[bool] = False
    #: As in `Backend`.
    shares_worker: ClassVar[bool] = False
    #: As in `Backend`.
    device_inputs: ClassVar[bool] = False

    def __init__(self, settings: dict[str, str]) -> None:
        """`settings` are this backend's settings on the command line: `--backend-config=NAME,KEY=VALUE`."""
        self.settings = settings

    def initialize(self) -> None:
        """Step 1: prepare what all models of this process use. An exception fails the load, as in `Backend.load`."""

    def finalize(self) -> None:
        """Step 7: free it, after the last model of this process."""


class ModelBackend(Backend):
    """A backend of which `load` makes an object that executes batches: its `_model`."""

    #: None before `load` and after `finalize`.
    _model: Any = None

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        assert self._model is not None, "execute before load"
        self._model.execute(requests, timings)

    def finalize(self) -> None:
        """Free the model's memory."""
        self._model = None


def is_complete(config: Config) -> bool:
    """Return whether a configuration has inputs and outputs. Then nothing is filled in, not even max_batch_size."""
    return bool(config.get("input")) and bool(config.get("output"))
