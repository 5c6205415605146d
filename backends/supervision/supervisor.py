"""Keeps one model instance alive: starts its worker, notices the loss of a worker, starts the next one.

The lifecycle makes a supervisor for each instance. The first worker of a model also completes the configuration, and
then loads the model in the same process.

The file is long because its short methods share the state of one instance: start, watch, loss, restart, end.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec

from backends.launch.launcher import Backoff, not_shown
from backends.launch.working import demanded_ns
from backends.supervision.handle import WorkerHandle
from backends.supervision.instance_watch import (
    MESSAGE_LIMIT_NS,
    ExecutionLimits,
    InstanceWatch,
    ReaderWaits,
    Sight,
    WatchStep,
    busy_text,
)
from backends.supervision.model_control import ModelControl, while_loading
from backends.supervision.session import HELLO_TIMEOUT_S, WorkerSession
from backends.transport import wire
from kernel.background import BackgroundTasks
from kernel.errors import (
    ExecutionTimeout,
    InternalError,
    NotFinishedInTime,
    ResponsesNotRead,
    ServingError,
    Unavailable,
)
from kernel.observe.limited_log import LimitedLog
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds
from kernel.serving.instances import Condition
from shm.arena import pinned_window

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from backends.launch.launcher import Launcher, Pending
    from backends.supervision.instance_watch import Finding
    from backends.supervision.shared_worker import SharedWorkers
    from backends.supervision.watchdog import Watchdog
    from kernel.loop.busy_poll import LoopPoller
    from kernel.repository.gpus import PinnedPool
    from kernel.repository.placement import InstancePlan
    from kernel.serving.helper_tasks import RegionAccess
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model
    from shm.blocks import ByteBudget

logger = logging.getLogger(__name__)
_unread = LimitedLog(logger, logging.WARNING)

_T = TypeVar("_T")

#: How often the timeouts of requests are checked that wait for a worker that is started again, in seconds.
EXPIRY_LOOK_S = 0.05

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
        watchdog: Watchdog,
        limits: ExecutionLimits,
        load_timeout_s: float = 0,
        budget: ByteBudget | None = None,
        shared: SharedWorkers | None = None,
        kernel: Kernel | None = None,
        pinned_pool: PinnedPool | None = None,
    ) -> None:
        """A worker that completes or loads its model for longer than `load_timeout_s` is killed; 0 for no limit.

        `arena_byte_size` is the limit of the worker's outputs. They count in `budget`, the server's, if it has one.
        `limits` are those of models that have none of their own. `shared` starts workers of models that share one.
        `kernel` executes what models ask of the server; without it they may ask nothing.
        `pinned_pool` has the pinned memory of instances on GPUs.
        """
        self._pinned_pool = pinned_pool
        self._pinned_byte_size = 0  # what the instance has of it
        self._watchdog = watchdog
        self._limits = limits
        self._watch = InstanceWatch(ExecutionLimits())
        self._reader_waits = ReaderWaits()
        self._launcher = launcher
        self._shared = shared
        self._poller = poller
        self._helper = helper
        self._budget = budget
        self._kernel = kernel
        self._control: ModelControl | None = None
        self._load_timeout_s = load_timeout_s
        self._arena_byte_size = arena_byte_size
        self._verbose = verbose
        #: What the lines of all its workers begin with in the log, and what its first worker needs.
        self._title, self._needs = "", NO_NEEDS
        self.pending: Pending = not_shown
        self._session: WorkerSession | None = None
        self._handle: WorkerHandle | None = None
        #: The worker that was lost last, while no other has taken its place.
        self._lost_handle: WorkerHandle | None = None
        self._plan: InstancePlan | None = None
        self._load: wire.Load | None = None
        self._model: Model | None = None
        self._backoff = Backoff()
        self._restarts = BackgroundTasks()
        self._restart: asyncio.Task[None] | None = None
        self._loaded = False
        #: Whether the instance is in service. Its next worker is then in service too.
        self._serving = False
        self._stopped = False
        #: Whether the worker gets no batches for now: its process is stopped, or is being ended.
        self._suspended = False
        #: The error of the requests of a worker that is being ended.
        self._ending: ServingError | None = None

    async def start(self, title: str, needs: WorkerNeeds = NO_NEEDS) -> None:
        """Start a worker without a model, in a shared process if that has a name in `needs`. Raises `ServingError`."""
        self._title = title
        self._use_launcher(needs)
        self._session = self._new_session(title)
        self._watchdog.add(self)
        await self._started(self._session, needs)

    def _use_launcher(self, needs: WorkerNeeds) -> None:
        """Start workers with these needs from now on, in a shared process if that has a name in them."""
        if needs.worker:
            assert self._shared is not None, "no process can be shared"
            self._launcher = self._shared.launcher(needs.worker)
        self._needs = needs

    async def _started(self, session: WorkerSession, needs: WorkerNeeds) -> None:
        """Start the worker of `session`. One that works may take as long as a load."""
        limit_s = max(self._load_timeout_s, HELLO_TIMEOUT_S) if self._load_timeout_s else 0
        await self._in_time(
            session,
            session.start(self._launcher, needs=needs, pending=self._show_pending),
            "waiting for its worker",
            limit_s,
        )

    def _show_pending(self, text: str) -> None:
        """Show what the start of a worker waits for: of a version that loads, or of an instance that was lost."""
        if self._model is None:
            self.pending(text)
        elif text and self._lost_handle is not None and self._plan is not None:
            condition = Condition(f"instance '{self._plan.name}' is started again: {text}", lost=True)
            self._model.instances.set_condition(self._lost_handle, condition)

    def _new_session(self, title: str) -> WorkerSession:
        session = WorkerSession(title)
        if self._kernel is not None:
            self._control = ModelControl(session, self._kernel)
        return session

    async def complete(
        self, config: str, model_dir: str, version: int, backend_config: dict[str, str], *, verify: bool = False
    ) -> str:
        """Return the configuration completed from the model file, in JSON. Raises `ServingError`.

        With `verify` the files are checked against the configuration, which is complete.
        """
        assert self._session is not None
        message = wire.Complete(config, model_dir, version, backend_config, verify, wire.PROTOCOL)
        limit_s, doing = self._load_timeout_s, "completing its configuration"
        with while_loading(self._control, config):
            completed = await self._in_time(self._session, self._session.complete(message), doing, limit_s)
        if completed.by_model and not verify and not self._needs.worker:
            await self._start_another(self._session)
        return completed.config

    async def gpu_obstacle(self, config: str, model_dir: str, version: int, backend_config: dict[str, str]) -> str:
        assert self._session is not None
        question = wire.AskGpu(config, model_dir, version, backend_config, wire.PROTOCOL)
        doing = "looking for what its backend needs on a GPU"
        return await self._in_time(self._session, self._session.ask_gpu(question), doing, self._load_timeout_s)

    async def _start_another(self, used: WorkerSession) -> None:
        """Replace the worker that has completed the configuration. Raises `ServingError`.

        Code of the model has done it, and the instance does not get what this code has changed in its process; or the
        instance is in a process with others.
        """
        session = self._session = self._new_session(self._title)
        try:
            _, failure = await asyncio.gather(
                used.stop(FINALIZE_GRACE_S), self._started(session, self._needs), return_exceptions=True
            )
        except BaseException:
            used.kill()
            raise
        if failure is not None:
            raise failure

    async def load(self, plan: InstancePlan, config: str, together: int = 1) -> int:
        self._plan = plan
        load = self._load = wire.Load(
            config, plan.model_dir, plan.version, plan.name, plan.kind, plan.device_id,
            self._arena_byte_size, self._verbose, plan.backend_config, plan.cpus, protocol=wire.PROTOCOL,
        )  # fmt: skip
        if plan.kind == "GPU":
            load.device_pool_byte_size = plan.device_pool_byte_size
            if self._pinned_pool is not None and not self._pinned_byte_size:
                self._pinned_byte_size = self._pinned_pool.take(together)
                if not self._pinned_byte_size:
                    logger.warning(
                        "instance '%s' pins no memory, so its copies to and from the GPU take longer: other instances "
                        "have what --pinned-memory-pool-byte-size=%d allows",
                        plan.name, self._pinned_pool.byte_size,
                    )  # fmt: skip
            load.pinned_byte_size = self._pinned_byte_size
        if plan.needs.worker:
            assert self._shared is not None, "no process can be shared"
            self._shared.join(self, plan)
        if self._session is None:
            await self.start(plan.name, plan.needs)
        elif plan.needs.worker != self._needs.worker:
            self._use_launcher(plan.needs)
            await self._start_another(self._session)
        assert self._session is not None
        with while_loading(self._control, config):
            load_ns = await self._load_into(self._session, self._load)
        self._loaded = True
        return load_ns

    async def _load_into(self, session: WorkerSession, message: wire.Load) -> int:
        return await self._in_time(session, session.load(message), "loading", self._load_timeout_s)

    async def _in_time(self, session: WorkerSession, work: Awaitable[_T], doing: str, limit_s: float) -> _T:
        """Return the result of `work`. After `limit_s` seconds, 0 for no limit, kills the worker and raises
        `InternalError`."""
        try:
            async with asyncio.timeout(limit_s or None):
                return await work
        except TimeoutError:
            session.kill()
            limit = f"{limit_s:g} s (--model-load-timeout-secs)"
            raise InternalError(f"the model was still {doing} after {limit}, and its worker was killed") from None

    def demanded_ns(self) -> int | None:
        """See `InstanceKeeper`. It is not known of a worker of another host, nor before the worker has begun."""
        return None if self._session is None or not self._session.pid else demanded_ns(self._session.pid)

    def join(self, model: Model) -> WorkerHandle:
        """Add the instance to `model`, set apart, and restart its worker from now on if it is lost."""
        self._model = model
        timeout_ns = model.spec.execution_timeout_ns
        if timeout_ns is not None and self._limits.changeable:
            setting = "parameter naiad.execution_timeout of the model"
            self._limits = msgspec.structs.replace(self._limits, timeout_ns=timeout_ns, setting=setting)
        return self._make_handle()

    def serve(self) -> None:
        """Put the instance in service."""
        assert self._model is not None
        self._serving = True
        if self._handle is not None and not self._suspended:
            self._put_in_service(self._handle)

    def set_restart_config(self, config: str) -> None:
        """Use this configuration when a worker must be restarted."""
        assert self._load is not None
        self._load = msgspec.structs.replace(self._load, config=config)

    async def retire(self, limit_s: float) -> None:
        """Take no more batches, and wait until the instance's batches are finished. A lost worker is not replaced.

        After `limit_s` seconds the worker is killed: requests that it has begun fail, others go back to the scheduler.
        """
        self._stopped = True
        handle = self._handle
        if handle is None:
            return
        assert self._model is not None
        self._model.instances.retire(handle)
        try:
            async with asyncio.timeout(limit_s):
                await self._model.instances.left(handle)
                await handle.drain()
        except TimeoutError:
            logger.error("model instance '%s' has not finished within %g s and is killed", handle.name, limit_s)
            self._ending = NotFinishedInTime(f"model instance '{handle.name}'", limit_s)
            if self._session is not None:
                self._session.kill()
            await handle.drain()

    async def released(self, limit_s: float) -> None:
        handle = self._handle
        if handle is None:
            return
        try:
            async with asyncio.timeout(limit_s):
                await handle.released()
        except TimeoutError:
            logger.warning(
                "model instance '%s' ends, and other models still use tensors that it has left on its GPU", handle.name
            )

    async def stop(self, *, at_once: bool = False) -> None:
        """Finalize the model and end the worker. With `at_once`, or if no model is loaded, only kill the worker.

        The instance must have no requests.
        """
        self._stopped = True
        if self._pinned_pool is not None:
            self._pinned_pool.give(self._pinned_byte_size)
            self._pinned_byte_size = 0
        self._watchdog.remove(self)
        if self._plan is not None and self._plan.needs.worker and self._shared is not None:
            self._shared.leave(self, self._plan)
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait([self._restart])
        if self._session is not None:
            await self._session.stop(FINALIZE_GRACE_S if self._loaded and not at_once else 0)
        self._forget_loss()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.stopped()

    # ---- the watchdog ------------------------------------------------------------------------

    @property
    def shortest_limit_s(self) -> float:
        limits = self._watch.limits
        return min((limit for limit in (limits.report_ns, limits.timeout_ns) if limit), default=0) / 1e9

    def look(self, now_ns: int) -> None:
        session, handle = self._session, self._handle
        if session is None:
            return
        stopped = session.stopped
        marks = handle.work_marks() if handle is not None and self._serving else ()
        finding = self._watch.look(Sight(now_ns, marks, stopped, session.incomplete_since))
        if finding.step is WatchStep.DROP:
            session.drop(f"it did not send the rest of a message within {MESSAGE_LIMIT_NS / 1e9:g} s")
        elif handle is not None and self._serving:
            self._act(session, handle, finding, stopped=stopped)
            self._end_unread(handle, now_ns)

    def _end_unread(self, handle: WorkerHandle, now_ns: int) -> None:
        """Fail the requests whose responses nobody has taken for too long: the model waits, and so do others."""
        limit_ns = self._limits.response_wait_ns
        if not limit_ns or self._model is None or not self._model.spec.decoupled:
            return
        for request in self._reader_waits.overdue(handle.blocked_requests(), now_ns, limit_ns):
            _unread.log(
                f"model '{self._model.name}'",
                "model instance '%s' has waited for %g s for a client that reads no responses: its request is "
                "cancelled (--response-wait-timeout)",
                handle.name, limit_ns / 1e9,
            )  # fmt: skip
            request.cancel()
            if not request.finished:
                request.fail(ResponsesNotRead(self._model.name, limit_ns / 1e9))

    def _act(self, session: WorkerSession, handle: WorkerHandle, finding: Finding, *, stopped: bool) -> None:
        """Do what the watch has found about an instance in service."""
        assert self._model is not None
        busy_s = finding.busy_ns / 1e9
        if finding.step is WatchStep.TERMINATE:
            limit_s, setting = self._watch.limits.timeout_ns / 1e9, self._watch.limits.setting
            logger.error(
                "model instance '%s' has executed for %.1f s, longer than %g s (%s): its worker is ended",
                handle.name, busy_s, limit_s, setting,
            )  # fmt: skip
            self._ending = ExecutionTimeout(self._model.name, busy_s, limit_s, setting)
            self._model.statistics.execution_timeouts += 1
            session.terminate()
        elif finding.step is WatchStep.KILL:
            session.kill()
        elif finding.report:
            logger.warning("%s", busy_text(handle.name, busy_s, limited=self._watch.limits.timeout_ns > 0))
            session.write_stacks()
        if self._handle is not handle:
            return  # the worker is lost already
        self._suspend(handle, stopped=stopped)
        condition = None
        if stopped:
            condition = Condition(f"instance '{handle.name}' stopped by a signal (SIGSTOP)", stopped=True)
        elif finding.overdue:
            condition = Condition(f"instance '{handle.name}' busy for {busy_s:.0f} s")
        self._model.instances.set_condition(handle, condition)

    def _suspend(self, handle: WorkerHandle, *, stopped: bool) -> None:
        """Give no batches to a worker that is stopped or being ended; give it batches again when it continues."""
        assert self._model is not None
        suspended = stopped or self._ending is not None
        if suspended == self._suspended:
            return
        self._suspended = suspended
        if stopped:
            logger.error("the process of model instance '%s' is stopped by a signal (SIGSTOP)", handle.name)
        elif not suspended:
            logger.info("the process of model instance '%s' continues", handle.name)
        if self._stopped:  # the instance is retired
            return
        if suspended:
            self._model.instances.set_apart(handle)
        else:
            self._put_in_service(handle)

    # ---- restarts ----------------------------------------------------------------------------

    def _make_handle(self) -> WorkerHandle:
        """Make the worker that has loaded the model the instance's worker."""
        assert self._session is not None
        assert self._model is not None
        assert self._plan is not None
        handle = self._handle = WorkerHandle(
            self._plan.name, self._session, self._model, self._poller, self._helper, self._budget,
            None if self._kernel is None else self._kernel.calls,
        )  # fmt: skip
        handle.record.device_id = self._plan.device_id
        handle.record.host = self._session.host
        handle.keep_pages(pinned_window(self._pinned_byte_size))
        self._session.on_lost = self._lost
        self._forget_loss()
        self._watch, self._suspended, self._ending = InstanceWatch(self._limits), False, None
        self._watchdog.add(self)
        self._session.send(wire.Joined())
        if self._serving:
            self._put_in_service(handle)
        else:
            self._model.instances.set_apart(handle)
        return handle

    def _put_in_service(self, handle: WorkerHandle) -> None:
        assert self._model is not None
        self._model.accept()
        self._model.instances.add(handle)

    def _forget_loss(self) -> None:
        lost, self._lost_handle = self._lost_handle, None
        if lost is not None and self._model is not None:
            self._model.instances.set_condition(lost, None)

    def _lost(self, cause: str) -> None:
        assert self._handle is not None
        assert self._plan is not None
        handle, self._handle = self._handle, None
        self._session = None
        if handle.has_executed:
            self._backoff.reset()
        logger.error("the worker of model instance '%s' was lost: %s", self._plan.name, cause)
        handle.lost(cause, self._ending)
        if not self._stopped:
            assert self._model is not None
            # For the repository index, until a worker has loaded the model again.
            self._lost_handle = handle
            self._model.instances.set_condition(
                handle, Condition(f"instance '{handle.name}' was lost and is started again: {cause}", lost=True)
            )
            self._restart = self._restarts.start(self._start_again())
            self._expire_later()

    def _expire_later(self) -> None:
        asyncio.get_running_loop().call_later(EXPIRY_LOOK_S, self._expire)

    def _expire(self) -> None:
        """Check the timeouts of queued requests while the model has no running worker."""
        if self._model is not None and not self._stopped and not self._model.instances.count:
            self._model.expire_queued()
            self._expire_later()

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
            session = self._new_session(self._title)
            try:
                self._session, self._watch = session, InstanceWatch(ExecutionLimits())
                await self._started(session, self._plan.needs)
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
        if self._lost_handle is not None:
            text = f"instance '{self._plan.name}' could not be started again: {error.message}"
            self._model.instances.set_condition(self._lost_handle, Condition(text, lost=True))
        if not self._model.instances.count:
            self._model.refuse(Unavailable(f"no instance of model '{self._model.name}' is alive: {error.message}"))
