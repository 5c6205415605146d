"""Runs the seven steps of a backend that is made of three classes (`CustomBackend` and its parts) as one `Backend`.

A step's `finalize` runs if its `initialize` has succeeded, in the opposite order, also when a later step fails.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

import msgspec

from backends.base import Backend, CustomBackend, CustomInstance
from kernel.errors import InvalidArgument, failure_logged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import Config, Host, ModelArguments, Timings
    from backends.worker.request import WorkerRequest

logger = logging.getLogger(__name__)


class _Living(msgspec.Struct, eq=False):
    """The backend object of this process, and how many models use it."""

    backend: CustomBackend
    users: int = 0


#: By class. Only code whose turn it is changes it (`backends.worker.members`).
_living: dict[type[CustomBackend], _Living] = {}


class SteppedBackend(Backend):
    """One model instance, by the steps of `custom_class`. `as_backend` makes a subclass for each backend."""

    custom_class: ClassVar[type[CustomBackend]]

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._backend: CustomBackend | None = None
        self._instance: CustomInstance | None = None
        #: `finalize` of the steps that have succeeded, in their order.
        self._finalizers: list[Callable[[], None]] = []

    def complete(self, arguments: ModelArguments) -> Config:
        backend = self._initialized_backend(arguments)
        return backend.model_class(backend, arguments).complete()

    def load(self, arguments: ModelArguments) -> None:
        """Steps 1 to 3."""
        backend = self._initialized_backend(arguments)
        model = backend.model_class(backend, arguments)
        model.initialize()
        self._finalizers.append(model.finalize)
        instance = backend.instance_class(model, self.host)
        instance.initialize()
        self._finalizers.append(instance.finalize)
        self._instance = instance
        wanted = instance.device_inputs
        self.device_inputs = backend.device_inputs if wanted is None else wanted

    @property
    def executor(self) -> Callable[[Sequence[WorkerRequest], Timings], None]:
        """The method of the instance: it is called directly, which saves a call for each batch."""
        assert self._instance is not None, "execute before load"
        return self._instance.execute

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Step 4."""
        self.executor(requests, timings)

    def finalize(self) -> None:
        """Steps 5 to 7, as far as their opposites were done. Errors are only logged."""
        while self._finalizers:
            step = self._finalizers.pop()
            with failure_logged(logger, "the backend failed in %s", step.__qualname__):
                step()

    def _initialized_backend(self, arguments: ModelArguments) -> CustomBackend:
        """Return the backend object of this process; step 1, if there is none yet."""
        if self._backend is None:
            kind = self.custom_class
            living = _living.get(kind)
            if living is None:
                living = _Living(kind(dict(arguments.backend_config)))
                living.backend.initialize()
                _living[kind] = living
            living.users += 1
            self._backend = living.backend
            self._finalizers.append(self._leave_backend)
        return self._backend

    def _leave_backend(self) -> None:
        """Step 7, after the last model of this process."""
        living = _living[self.custom_class]
        living.users -= 1
        if not living.users:
            del _living[self.custom_class]
            living.backend.finalize()


def as_backend(found: object, title: str) -> type[Backend]:
    """Return the class that a worker uses for `found`, a subclass of `Backend` or of `CustomBackend`.

    Raises `InvalidArgument` for anything else; `title` says where it was found.
    """
    if isinstance(found, type) and issubclass(found, Backend):
        return found
    if not (isinstance(found, type) and issubclass(found, CustomBackend)):
        raise InvalidArgument(
            f"{title} must be a subclass of backends.base.Backend or backends.base.CustomBackend, "
            f"got {found.__name__ if isinstance(found, type) else type(found).__name__}"
        )
    instances = getattr(found, "instance_class", None)
    if not (isinstance(instances, type) and issubclass(instances, CustomInstance)):
        raise InvalidArgument(f"{title} must name the class of its instances: instance_class, a CustomInstance")
    attributes = {
        "custom_class": found,
        "responds_later": found.responds_later,
        "shares_worker": found.shares_worker,
        "__module__": found.__module__,
    }
    return type(found.__name__, (SteppedBackend,), attributes)
