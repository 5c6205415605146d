"""Keeps one model instance alive: starts its worker, notices the loss of a worker, starts the next one.

The lifecycle makes a supervisor for each instance. The first worker of a model also completes the configuration, and
then loads the model in the same process.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec

from backends.supervision.backoff import Backoff
from backends.supervision.handle import WorkerHandle
from backends.supervision.session import WorkerSession
from backends.transport import wire
from kernel.errors import InternalError, ServingError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from backends.supervision.launcher import Launcher
    from backends.supervision.remote_memory import RegionAccess
    from kernel.loop.busy_poll import LoopPoller
    from kernel.repository.placement import InstancePlan
    from kernel.serving.model import Model
    from shm.budget import ByteBudget

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: How long a worker may take to finalize its model before it is killed, in seconds.
FINALIZE_GRACE_S = 5.0


class InstanceSupervisor:
    """One instance, over any number of worker processes one after the other."""

    def __init__(
        self,
        launcher: Launcher,
        poller: LoopPoller,
        helper: RegionAccess,
        *,
        arena_byte_size: int,
        verbose: int,
        load_timeout_s: float = 0,
        budget: ByteBudget | None = None,
    ) -> None:
        """A worker that completes or loads its model for longer than `load_timeout_s` is killed; 0 for no limit.

        `arena_byte_size` is the limit of the worker's outputs. They count in `budget`, the server's, if it has one.
        """
        self._launcher = launcher
        self._poller = poller
        self._helper = helper
        self._budget = budget
        self._load_timeout_s = load_timeout_s
        self._arena_byte_size = arena_byte_size
        self._verbose = verbose
        self._session: WorkerSession | None = None
        self._handle: WorkerHandle | None = None
        self._plan: InstancePlan | None = None
        self._load: wire.Load | None = None
        self._model: Model | None = None
        self._backoff = Backoff()
        self._restart: asyncio.Task[None] | None = None
        self._loaded = False
        #: Whether the instance is in service. Its next worker is then in service too.
        self._serving = False
        self._stopped = False

    async def start(self, title: str) -> None:
        """Start a worker process without a model. Raises `ServingError`."""
        self._session = WorkerSession(title)
        await self._session.start(self._launcher)

    async def complete(self, config: str, model_dir: str, version: int, backend_config: dict[str, str]) -> str:
        """Return the configuration completed from the model file, in JSON. Raises `ServingError`."""
        assert self._session is not None
        message = wire.Complete(config, model_dir, version, backend_config)
        return await self._in_time(self._session, self._session.complete(message), "completing its configuration")

    async def load(self, plan: InstancePlan, config: str) -> int:
        """Load the model in the worker; returns the duration in nanoseconds. Raises `ServingError`."""
        self._plan = plan
        self._load = wire.Load(
            config, plan.model_dir, plan.version, plan.name, plan.kind, plan.device_id,
            self._arena_byte_size, self._verbose, plan.backend_config, plan.cpus,
        )  # fmt: skip
        if self._session is None:
            await self.start(plan.name)
        assert self._session is not None
        load_ns = await self._load_into(self._session, self._load)
        self._loaded = True
        return load_ns

    async def _load_into(self, session: WorkerSession, message: wire.Load) -> int:
        return await self._in_time(session, session.load(message), "loading")

    async def _in_time(self, session: WorkerSession, work: Awaitable[_T], doing: str) -> _T:
        """Return the result of `work`. On a timeout, kills the worker and raises `InternalError`."""
        try:
            async with asyncio.timeout(self._load_timeout_s or None):
                return await work
        except TimeoutError:
            session.kill()
            raise InternalError(
                f"the model was still {doing} after {self._load_timeout_s:g} s, and its worker was killed"
            ) from None

    def join(self, model: Model) -> WorkerHandle:
        """Add the instance to `model`, set apart, and restart its worker from now on if it is lost."""
        self._model = model
        return self._make_handle()

    def serve(self) -> None:
        """Put the instance in service."""
        assert self._model is not None
        self._serving = True
        if self._handle is not None:
            self._model.instances.add(self._handle)

    def set_restart_config(self, config: str) -> None:
        """Use this configuration when a worker must be restarted."""
        assert self._load is not None
        self._load = msgspec.structs.replace(self._load, config=config)

    async def retire(self) -> None:
        """Take no more batches, and wait until the instance's batches are finished. A lost worker is not replaced."""
        self._stopped = True
        if self._handle is not None:
            assert self._model is not None
            self._model.instances.set_apart(self._handle)
            await self._handle.drain()

    async def stop(self, *, at_once: bool = False) -> None:
        """Finalize the model and end the worker. With `at_once`, or if no model is loaded, only kill the worker.

        The instance must have no requests.
        """
        self._stopped = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait([self._restart])
        if self._session is not None:
            await self._session.stop(FINALIZE_GRACE_S if self._loaded and not at_once else 0)
        if self._handle is not None:
            self._handle.stopped()

    # ---- restarts ----------------------------------------------------------------------------

    def _make_handle(self) -> WorkerHandle:
        """Make the worker that has loaded the model the instance's worker."""
        assert self._session is not None
        assert self._model is not None
        assert self._plan is not None
        handle = self._handle = WorkerHandle(
            self._plan.name, self._session, self._model, self._poller, self._helper, self._budget
        )
        self._session.on_lost = self._lost
        self._session.send(wire.Joined())
        if self._serving:
            self._model.instances.add(handle)
        else:
            self._model.instances.set_apart(handle)
        return handle

    def _lost(self, cause: str) -> None:
        assert self._handle is not None
        assert self._plan is not None
        handle, self._handle = self._handle, None
        self._session = None
        if handle.has_executed:
            self._backoff.reset()
        logger.error("the worker of model instance '%s' was lost: %s", self._plan.name, cause)
        handle.lost(cause)
        if not self._stopped:
            self._restart = asyncio.get_running_loop().create_task(self._start_again())

    async def _start_again(self) -> None:
        """Start workers until one has loaded the model."""
        assert self._plan is not None
        assert self._load is not None
        name = self._plan.name
        while not self._stopped:
            delay = self._backoff.next_delay_s()
            if delay:
                logger.warning("model instance '%s' is restarted in %.0f s", name, delay)
                await asyncio.sleep(delay)
            session = WorkerSession(name)
            try:
                self._session = session
                await session.start(self._launcher)
                load_ns = await self._load_into(session, self._load)
            except ServingError as error:
                self._session = None
                session.kill()
                self._failed(error)
                continue
            except asyncio.CancelledError:
                session.kill()
                raise
            logger.info("model instance '%s' is ready again, loaded in %.3f s", name, load_ns / 1e9)
            self._make_handle()
            return

    def _failed(self, error: ServingError) -> None:
        assert self._plan is not None
        assert self._model is not None
        logger.error("model instance '%s' could not be started again: %s", self._plan.name, error.message)
        if not self._model.instances.count:
            self._model.fail_queued(Unavailable(f"no instance of model '{self._model.name}' is alive: {error.message}"))
