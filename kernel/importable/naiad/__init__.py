"""Naiad for Python programs: a server inside a program, and what backends, schedulers, caches and agents are made of.

The names of this module, and of `naiad.testing`, stay: docs/embedding.md lists them. All other modules of the packages
`kernel`, `protocols`, `schedulers`, `backends` and `shm` may change with any release.

Importing this module imports nothing else of the server: each name is looked up when it is first used. A program may
have packages of its own called `kernel`, `backends` and so on, see `naiad.packages`.
"""

from __future__ import annotations

from naiad.packages import share_names

TYPE_CHECKING = False  # as type checkers know it: the module `typing` is not needed here
if TYPE_CHECKING:
    from typing import Any

    from backends.base import Backend as Backend
    from backends.base import CustomBackend as CustomBackend
    from backends.base import CustomInstance as CustomInstance
    from backends.base import CustomModel as CustomModel
    from backends.base import Host as Host
    from backends.base import ModelArguments as ModelArguments
    from backends.base import PreparedBatch as PreparedBatch
    from backends.base import Timings as Timings
    from backends.batch_tensors import batch_sizes as batch_sizes
    from backends.batch_tensors import gather as gather
    from backends.batch_tensors import scatter as scatter
    from backends.reshape import TensorShapes as TensorShapes
    from backends.reshape import tensor_specs as tensor_specs
    from backends.streaming import StreamingBackend as StreamingBackend
    from backends.worker.devices.tensors import DeviceArray as DeviceArray
    from backends.worker.request import OutputValue as OutputValue
    from backends.worker.request import WorkerRequest as WorkerRequest
    from kernel.cache.interface import CacheStore as CacheStore
    from kernel.embedding import EmbeddedServer as EmbeddedServer
    from kernel.embedding import NotRunning as NotRunning
    from kernel.embedding import StartFailed as StartFailed
    from kernel.embedding.requests import Outputs as Outputs
    from kernel.embedding.requests import ResponseStream as ResponseStream
    from kernel.errors import AlreadyExists as AlreadyExists
    from kernel.errors import BadOption as BadOption
    from kernel.errors import ErrorCode as ErrorCode
    from kernel.errors import InternalError as InternalError
    from kernel.errors import InvalidArgument as InvalidArgument
    from kernel.errors import NotFound as NotFound
    from kernel.errors import RequestCancelled as RequestCancelled
    from kernel.errors import ServingError as ServingError
    from kernel.errors import Unavailable as Unavailable
    from kernel.errors import UnknownError as UnknownError
    from kernel.errors import Unsupported as Unsupported
    from kernel.repository.agents import AgentModel as AgentModel
    from kernel.repository.agents import RepositoryAgent as RepositoryAgent
    from kernel.serving.batch import Batch as Batch
    from kernel.serving.events import BatchesRecalled as BatchesRecalled
    from kernel.serving.events import Cancelled as Cancelled
    from kernel.serving.events import ChildResponded as ChildResponded
    from kernel.serving.events import Consumed as Consumed
    from kernel.serving.events import DeadlineReached as DeadlineReached
    from kernel.serving.events import InstanceIdle as InstanceIdle
    from kernel.serving.events import InstanceLost as InstanceLost
    from kernel.serving.events import NoInstanceLeft as NoInstanceLeft
    from kernel.serving.events import RequestRescheduled as RequestRescheduled
    from kernel.serving.events import Submitted as Submitted
    from kernel.version import __version__ as __version__
    from schedulers.batching_rules import BatchingRule as BatchingRule

#: Module → its names that are public.
_PLACES = {
    "backends.base": ("Backend CustomBackend CustomInstance CustomModel Host ModelArguments PreparedBatch Timings"),
    "backends.batch_tensors": "batch_sizes gather scatter",
    "backends.reshape": "TensorShapes tensor_specs",
    "backends.streaming": "StreamingBackend",
    "backends.worker.devices.tensors": "DeviceArray",
    "backends.worker.request": "OutputValue WorkerRequest",
    "kernel.cache.interface": "CacheStore",
    "kernel.embedding": "EmbeddedServer NotRunning StartFailed",
    "kernel.embedding.requests": "Outputs ResponseStream",
    "kernel.errors": (
        "AlreadyExists BadOption ErrorCode InternalError InvalidArgument NotFound RequestCancelled ServingError "
        "Unavailable UnknownError Unsupported"
    ),
    "kernel.repository.agents": "AgentModel RepositoryAgent",
    "kernel.serving.batch": "Batch",
    "kernel.serving.events": (
        "BatchesRecalled Cancelled ChildResponded Consumed DeadlineReached InstanceIdle InstanceLost NoInstanceLeft "
        "RequestRescheduled Submitted"
    ),
    "kernel.version": "__version__",
    "schedulers.batching_rules": "BatchingRule",
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}

share_names()


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'naiad' has no attribute '{name}'")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
