"""What a backend implements: `complete`, `load`, `execute`, `finalize`, all in a worker process.

A worker has one backend object for its one model instance, and calls it from one thread, in this
order: `complete` (first worker of a model only), `load`, any number of `execute`, `finalize`.
"""

from __future__ import annotations

import abc
import time
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from backends.metric_registry import MetricRegistry
    from backends.worker.request import WorkerRequest

Config = dict[str, Any]


class ModelArguments(msgspec.Struct, frozen=True):
    """What a backend is told about its model. `config` is in the JSON form of `/config`."""

    config: Config
    #: The model's folder in the repository, with one folder per version.
    model_dir: Path
    version: int
    #: Name, kind (`CPU`, `GPU`, `MODEL`) and device of the instance; empty for `complete`.
    instance_name: str = ""
    kind: str = "CPU"
    device_id: int = 0
    #: What the command line says of the backend (--backend-config), by setting.
    backend_config: dict[str, str] = {}

    @property
    def model_name(self) -> str:
        return str(self.config["name"])

    @property
    def version_dir(self) -> Path:
        return self.model_dir / str(self.version)

    @property
    def max_batch_size(self) -> int:
        return int(self.config.get("max_batch_size", 0))

    @property
    def decoupled(self) -> bool:
        return bool(self.config.get("model_transaction_policy", {}).get("decoupled", False))

    def parameter(self, key: str) -> str | None:
        """Return the model's configuration parameter `key`, or None."""
        found = self.config.get("parameters", {}).get(key)
        return None if found is None else str(found.get("string_value", ""))

    def model_file(self, default: str) -> Path:
        """Return the path of the model file: `default_model_filename` or `default` in the version's folder."""
        return self.version_dir / (self.config.get("default_model_filename") or default)


class Host(Protocol):
    """What the worker offers its backend."""

    def log(self, level: str, text: str) -> None:
        """Write one line to the server's log; level is INFO, WARNING, ERROR or VERBOSE."""

    @property
    def metrics(self) -> MetricRegistry:
        """Where the model defines metrics of its own."""


class Timings(msgspec.Struct):
    """Where the time of one `execute` went: `inputs_ready` and `inferred` end the first two of three parts.

    Times are monotonic nanoseconds, all those of the start at first: without a mark a part has no length.
    """

    start_ns: int
    inputs_ready_ns: int
    inferred_ns: int
    clock: Callable[[], int] = time.monotonic_ns

    def inputs_ready(self) -> None:
        """The model itself starts now."""
        self.inputs_ready_ns = self.inferred_ns = self.clock()

    def inferred(self) -> None:
        """The model itself is done; what follows is writing its outputs."""
        self.inferred_ns = self.clock()


class Backend(abc.ABC):
    """One model instance in its worker process."""

    #: Whether requests may be answered after `execute` has returned. If not, the worker fails those
    #: that were forgotten.
    answers_later: ClassVar[bool] = False

    def __init__(self, host: Host) -> None:
        self.host = host

    def complete(self, arguments: ModelArguments) -> Config:
        """Return the configuration with what the model file knows filled in; a new dict.

        Raises `ServingError` where configuration and file contradict each other.
        """
        return dict(arguments.config)

    @abc.abstractmethod
    def load(self, arguments: ModelArguments) -> None:
        """Load the model. What is raised is the reason why the model is UNAVAILABLE."""

    @abc.abstractmethod
    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Run the requests as one batch and answer each of them (see `WorkerRequest.respond`).

        What is raised fails every request that has no final response yet: a `ServingError` with its
        own code and text, anything else as INTERNAL. Requests of a decoupled model may be answered
        after `execute` has returned, from any thread.
        """

    def finalize(self) -> None:  # noqa: B027 - most backends have nothing to end
        """The worker stops. Not called when it is killed."""
