"""The composition root: builds the server from its parts, starts and stops it. Imports everything.

Order of start: sockets are bound, front doors listen while models load, and the server is ready when these are loaded.
With --listen-while-loading=false the doors listen last, as in Triton. At the stop: refuse, drain, close, end workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio

import protocols.http.light_aiohttp  # noqa: F401 - before the modules that import aiohttp
from backends.helper.pool import HelperPool
from backends.helper.server_devices import ServerDevices
from backends.launch.launcher import LauncherSet, packaged_launcher
from backends.launch.output import OutputLimits
from backends.launch.worker_processes import WorkerProcesses
from backends.registry import known_backends
from backends.supervision.idle_priority import IdlePriority
from backends.supervision.instance_watch import ExecutionLimits
from backends.supervision.shared_worker import SharedWorkers
from backends.supervision.supervisor import InstanceSupervisor
from backends.supervision.watchdog import Watchdog
from kernel.cache.config import parse_cache_config
from kernel.errors import BadOption, ServingError
from kernel.loop.busy_poll import BusyPolling, LoopPoller
from kernel.loop.clock import LoopClock, in_next_iteration
from kernel.machine import give_memory_back, helper_count, memory_byte_size, processor_count
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import InputPlacer
from kernel.memory.reclaiming import GarbageCollection, give_freed_memory_back
from kernel.observe.metrics_config import parse_metrics_config
from kernel.observe.recent import make_recent
from kernel.options import AGENT, RAY
from kernel.records.tracer import Tracer, Tracing
from kernel.repository.backend_config import parse_backend_configs, with_allowed_pickles, with_directory
from kernel.repository.host_policy import parse_host_policies
from kernel.repository.lifecycle import Lifecycle
from kernel.repository.settings import LifecycleSettings
from kernel.serving.catalog import Catalog
from kernel.serving.interface import KernelSettings, ServerIdentity
from kernel.serving.kernel import Kernel, KernelParts
from kernel.serving.poison import PoisonExtension
from kernel.serving.route import RouteRules
from kernel.settings import TraceSettings
from kernel.startup import CannotListen, bind, creating_server, listen, load_first_models, show_loading
from kernel.texts import SERVER_PATHS
from kernel.tools.terminal import Terminal
from kernel.traffic.control import Traffic
from kernel.traffic.shadow import ShadowParts
from kernel.traffic.state_file import StateFile
from schedulers.registry import choose_scheduler
from shm.blocks import ByteBudget

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from pathlib import Path

    from backends.doors.pool import DoorPool
    from backends.launch.launcher import HostLauncher
    from backends.launch.spawning import SpawningLauncher
    from backends.launch.zygote_start import StartedZygote
    from kernel.cache.caching import ResponseCaching
    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.observe.metrics_config import MetricsConfig
    from kernel.operator import ServerOperator
    from kernel.options import ListenAddress, ServerOptions
    from kernel.repository.gpus import ServerGpus
    from kernel.server_parts import ServerPart
    from kernel.serving.events import Event
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from protocols.frontend import FrontDoor
    from schedulers.ratelimit import RateLimiting

#: How many helpers render chat templates and tokenize, and how many seconds one request may take there.
_TEXT_HELPERS, _TEXT_TIMEOUT_S = 2, 10.0

logger = logging.getLogger(__name__)

#: What front doors get beyond the exit time-out, to write the errors of requests that took too long.
_ANSWER_GRACE_S = 2


_Part = TypeVar("_Part", bound="ServerPart")


class DoorKind(NamedTuple):
    """A kind of front door."""

    #: In the ports that the operator of the server gets.
    name: str
    #: In errors.
    title: str
    #: Where it listens.
    listener: Callable[[ServerOptions], ListenAddress]
    #: The module whose `make_door` makes it; see `protocols.frontend.DoorParts`.
    module: str


#: All front doors, in the order in which they start.
FRONT_DOORS = (
    DoorKind("grpc", "GRPC", attrgetter("grpc_listener"), "protocols.grpc.server"),
    DoorKind("http", "HTTP", attrgetter("http_listener"), "protocols.http.server"),
    DoorKind("metrics", "Metrics", attrgetter("metrics_listener"), "protocols.http.metrics.server"),
    DoorKind("openai", "OpenAI", attrgetter("openai_listener"), "protocols.openai.server"),
)


class StartFailed(Exception):
    """The server cannot start; the message is one line."""


def serve(options: ServerOptions, notes: Sequence[str] = (), zygote: StartedZygote | None = None,
          operator: ServerOperator | None = None) -> int:  # fmt: skip
    """Run the server until a signal tells it to stop; returns the exit code. `notes` are logged as warnings.

    The server takes over the `zygote` if it forks workers; the caller ends the one that was not taken. `operator` is
    the operator of another command than `run`.
    """
    backends = functools.partial(known_backends, options.repository.backend_directory)
    terminal = operator or Terminal(options, notes, backends)
    try:
        return anyio.run(
            Server(options, terminal, zygote).run,
            backend="asyncio",
            backend_options={"use_uvloop": options.event_loop == "uvloop"},
        )
    except (StartFailed, CannotListen) as error:
        terminal.failed(str(error))
        return 1
    finally:
        terminal.end()


class Server:
    """The whole server, on one event loop."""

    def __init__(self, options: ServerOptions, owner: ServerOperator, zygote: StartedZygote | None = None) -> None:
        self._options = options
        self._zygote = zygote
        self._owner = owner
        self._log = options.log.settings()
        #: None for most servers.
        self._door_processes: DoorPool | None = None
        #: In the order in which they start. The kernel reads their figures from this list.
        self._parts: list[ServerPart] = []
        #: How many of them `_start_parts` has started.
        self._started_count = 0

    async def run(self) -> int:
        """Serve until the owner says stop. Returns the exit code; raises `StartFailed`, `CannotListen`, `BadOption`."""
        self._owner.begin(self._log)
        with contextlib.ExitStack() as stack:
            sockets = {
                door: stack.enter_context(bind(door.title, listener))
                for door in FRONT_DOORS
                if (listener := door.listener(self._options)).allow
            }
            # Now: from its start on the socket is the front door's, which may have given it to another process.
            ports = {door.name: sock.getsockname()[1] for door, sock in sockets.items()}
            SERVER_PATHS.add_repositories(self._options.repository.paths)
            self._recent = make_recent(self._options, self._log, owned=self._owner.owns_process)
            try:
                if self._recent is not None:
                    self._part(self._recent)
                    await self._start_parts()  # it has the lines of the whole start
                self._build()
                await self._start_parts()
            except ServingError as error:
                await self._close_parts()
                raise StartFailed(creating_server(error)) from None
            except BaseException:
                await self._close_parts()
                raise
            return await self._run_until_stop(sockets, ports)

    def _build(self) -> None:
        options = self._options
        # Without a metrics port, nothing reads these figures.
        metrics, _ = parse_metrics_config(options.metrics.config if options.metrics_listener.allow else ())
        catalog = Catalog(namespacing=options.repository.namespacing)
        polling = BusyPolling(options.busy_poll_us * 1000, processor_count())
        clock = LoopClock(polling.longest_ns)
        budget = ByteBudget(options.memory_byte_size or memory_byte_size() // 2)
        regions = RegionRegistry(
            owned=options.shared_memory_owner == "peer", per_peer_limit=options.regions_per_peer, budget=budget
        )
        inputs = InputPlacer(regions, options.arena_byte_size, budget, in_next_iteration)
        settings = self._make_settings()
        processes = self._make_processes()
        pool = functools.partial(HelperPool, processes.helper_launcher, budget=budget)
        helpers = self._part(pool(options.arena_byte_size, count=helper_count()))
        texts = self._make_text_helpers(processes, budget)
        devices = self._part(ServerDevices(processes.device_launcher, options.gpus, options.metrics.interval_ms))
        regions.devices = devices.regions
        caching = self._make_caching(catalog, helpers, clock, budget)
        tracer = Tracer(settings.trace, clock)
        self._part(Tracing(tracer, pool(1 << 20, count=1, title="trace writer"), options.trace))
        new_supervisor = self._supervisor_maker(processes, helpers, devices, polling, budget)
        limiting = self._make_limiting()
        self._lifecycle = Lifecycle(
            catalog,
            clock,
            self._schedule,
            new_supervisor,
            self._lifecycle_settings(metrics, limiting, caching, devices.gpus),
            self._owner.model_retired,
        )
        rules = RouteRules(catalog)
        traffic = Traffic(rules, clock, budget, self._lifecycle, namespacing=options.repository.namespacing)
        self._lifecycle.traffic_files.rules = traffic
        parts = KernelParts(
            repository=self._lifecycle,
            helpers=helpers,
            text_helpers=texts,
            rules=rules,
            traffic=traffic,
            server_parts=self._parts,
            starting=True,
            gpu_figures=devices.reader,
            lost_log_lines=self._owner.lost_log_lines,
        )
        self._kernel = Kernel(catalog, regions, inputs, clock, settings, tracer, parts)
        if options.front_door_processes:
            self._make_door_processes(catalog, processes)
        # The helper starts with its first comparison.
        comparer = self._part(pool(1 << 20, count=1, title="shadow comparer"))
        traffic.shadow_parts = ShadowParts(self._kernel.submit_copy, comparer, budget, IdlePriority(catalog))
        if options.record is not None:
            from kernel.records.recorder import Recording  # takes memory, which other servers need not spend

            self._part(Recording(self._kernel, pool(1 << 20, count=1, title="recorder"), options.record))
        if options.state_directory is not None:
            self._restore_traffic(traffic, options.state_directory)

    def _schedule(
        self, spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock
    ) -> Coroutine[int | None, Event, None]:
        """Return the scheduler of a model that is loaded; some submit requests themselves."""
        return choose_scheduler(spec, inbox, instances, clock, caller=self._kernel)

    def _restore_traffic(self, traffic: Traffic, directory: Path) -> None:
        """Keep traffic rules and rollouts in `directory`, and go on with what an earlier server has kept."""
        try:
            keeper = self._part(StateFile(directory))
        except OSError as error:
            raise StartFailed(f"--state-directory={directory} cannot be used: {error.strerror}") from None
        traffic.restore(keeper.read())
        traffic.keeper = keeper

    def _part(self, part: _Part) -> _Part:
        """Put `part` at the end of the list: it is closed at the end of the server, before those that it uses."""
        self._parts.append(part)
        return part

    async def _start_parts(self) -> None:
        """Start the parts that are new in the list. Raises `ServingError`."""
        while self._started_count < len(self._parts):
            self._started_count += 1
            await self._parts[self._started_count - 1].start()

    async def _close_parts(self) -> None:
        while self._parts:
            await self._parts.pop().close()

    def _lifecycle_settings(
        self, metrics: MetricsConfig, limiting: RateLimiting | None, caching: ResponseCaching | None, gpus: ServerGpus
    ) -> LifecycleSettings:
        """Return the settings of the repository. Raises `ServingError`."""
        options, repository = self._options, self._options.repository
        return LifecycleSettings(
            repositories=repository.paths,
            copies=repository.copies,
            explicit=repository.control_mode == "explicit",
            poll_s=repository.poll_s if repository.control_mode == "poll" else 0,
            auto_complete=repository.auto_complete_config,
            config_name=repository.config_name,
            namespacing=repository.namespacing,
            load_thread_count=repository.load_thread_count,
            load_retry_count=repository.load_retry_count,
            backend_configs=with_allowed_pickles(
                with_directory(parse_backend_configs(repository.backend_config), repository.backend_directory),
                repository.allow_pickle,
            ),
            host_policies=parse_host_policies(repository.host_policy),
            load_timeout_s=repository.load_timeout_s,
            unload_timeout_s=repository.unload_timeout_s,
            installs_requirements=options.environments.installs,
            metrics=metrics,
            backends=known_backends,
            extensions=tuple(each for each in (limiting, PoisonExtension(), caching, self._recent) if each is not None),
            has_cache=caching is not None,
            has_limiter=limiting is not None,
            gpus=gpus,
        )

    def _make_settings(self) -> KernelSettings:
        options = self._options
        return KernelSettings(
            trace=TraceSettings(options.trace),
            log=self._log,
            identity=ServerIdentity(name=options.server_id),
            strict_readiness=options.strict_readiness,
            explicit_control=options.repository.control_mode == "explicit",
            recent=self._recent,
            allow_client_shm=options.allow_client_shm,
            max_decompression_ratio=options.max_decompression_ratio,
        )

    def _make_caching(
        self, catalog: Catalog, helpers: HelperPool, clock: Clock, budget: ByteBudget
    ) -> ResponseCaching | None:
        """Return the response cache, if the options ask for one. Raises `ServingError`."""
        choice = parse_cache_config(self._options.cache.config, self._options.cache.local_byte_size)
        if choice is None:
            return None
        from kernel.cache.caching import (
            ResponseCaching,  # takes memory, which other servers need not spend
            make_cache,
        )

        cache = make_cache(choice, clock, budget)
        return self._part(ResponseCaching(cache, catalog, helpers=helpers, regions=helpers, clock=clock))

    def _make_door_processes(self, catalog: Catalog, processes: WorkerProcesses) -> None:
        from backends.doors.pool import DoorPool, DoorSettings  # takes memory, which other servers need not spend

        options = self._options
        settings = DoorSettings(
            options.arena_byte_size,
            options.shared_memory_owner == "peer",
            options.max_decompression_ratio,
            options.event_loop,
        )
        launcher, count = processes.door_launcher, options.front_door_processes
        self._door_processes = self._part(DoorPool(self._kernel, catalog, launcher, count, settings))

    def _make_limiting(self) -> RateLimiting | None:
        """Return the rate limiter, if the options ask for one."""
        if (options := self._options.rate_limit).mode == "off":
            return None
        from schedulers.ratelimit import (
            RateLimiter,
            RateLimiting,  # as above
            parse_limits,
        )

        return RateLimiting(RateLimiter(parse_limits(options.resources)))

    def _make_text_helpers(self, processes: WorkerProcesses, budget: ByteBudget) -> HelperPool:
        """Make the helpers that render chat templates and tokenize; they start when they are first needed."""
        pool = HelperPool(
            processes.text_launcher,
            self._options.arena_byte_size,
            budget,
            count=_TEXT_HELPERS,
            title="text helper",
            task_timeout_s=_TEXT_TIMEOUT_S,
            problem="a chat template or a tokenizer did not end",
        )
        return self._part(pool)

    def _make_processes(self) -> WorkerProcesses:
        """Make what starts processes on this machine. Raises `StartFailed`."""
        options = self._options
        try:
            return self._part(
                WorkerProcesses(
                    # A program may wait for all its children, and may fork while it has threads: we must not interfere.
                    options.worker_start if self._owner.owns_process else "spawn",
                    shared_memory=options.worker_shared_memory,
                    output_limits=_output_limits(options),
                    task_module="protocols.helper_tasks",
                    zygote=self._zygote,
                    environments=options.environments,
                )
            )
        except OSError as error:
            raise StartFailed(f"--worker-start=fork is not possible on this system: {error}") from None

    def _make_launchers(self, spawning: SpawningLauncher) -> dict[str, HostLauncher]:
        """Make the launchers for other hosts, by name, as parts of the server. Raises `ServingError`.

        `spawning` starts processes of theirs on this machine.
        """
        options, limits = self._options.launchers, _output_limits(self._options)
        found: dict[str, HostLauncher] = {}
        for name in options.others:
            if name == AGENT:
                from backends.hosts.encryption import Encryption  # most servers do without it
                from backends.hosts.launcher import AgentLauncher
                from backends.hosts.messages import read_token

                token = b"" if options.token_file is None else read_token(options.token_file)
                encryption = None if options.tls is None else Encryption(options.tls, listens=False)
                found[name] = self._part(AgentLauncher(options.agents, token, limits, encryption))
            elif name == RAY:
                from backends.hosts.ray_launcher import RayLauncher

                found[name] = self._part(
                    RayLauncher(spawning, options.ray_address, options.lease_s, limits, options.tls)
                )
            else:
                found[name] = self._part(packaged_launcher(name, limits))
        return found

    def _supervisor_maker(
        self,
        processes: WorkerProcesses,
        helpers: HelperPool,
        devices: ServerDevices,
        polling: BusyPolling,
        budget: ByteBudget,
    ) -> Callable[[], InstanceSupervisor]:
        """Make what all workers of models share. Returns a function that makes supervisors."""
        options = self._options
        launcher = LauncherSet(
            processes.launcher,
            self._make_launchers(processes.door_launcher),
            options.launchers.names[0],
            options.launchers.max_local_workers or processor_count(),
        )
        shared = SharedWorkers(launcher, _output_limits(options))
        poller, watchdog = LoopPoller(polling), Watchdog()
        return lambda: InstanceSupervisor(
            launcher,
            poller,
            helpers,
            arena_byte_size=options.arena_byte_size,
            watchdog=watchdog,
            limits=_limits_of(options),
            verbose=1,  # always sent: the log decides what is shown, and clients may change that at any time
            load_timeout_s=options.repository.load_timeout_s,
            budget=budget,
            shared=shared,
            kernel=self._kernel,
            pinned_pool=devices.pinned_pool,
        )

    async def _run_until_stop(self, sockets: dict[DoorKind, socket.socket], ports: dict[str, int]) -> int:
        stop = asyncio.Event()
        failure: Exception | None = None
        doors: list[FrontDoor] = []
        self._part(self._lifecycle)  # it starts beside the front doors, which listen while models load
        code = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._owner.wait_for_stop, stop)
            garbage = GarbageCollection(self._count_live) if self._owner.owns_process else None
            if garbage is not None:
                garbage.begin()
            tasks.start_soon(give_freed_memory_back, self._kernel.budget, give_memory_back, garbage)
            try:
                failure = await self._load_and_make_doors(stop, sockets, doors)
                if failure is None:
                    if not stop.is_set():
                        await self._open(doors, ports)
                        await stop.wait()
                    code = await self._stop(doors)
            finally:
                with anyio.CancelScope(shield=True):
                    if code:
                        await self._lifecycle.close(at_once=True)
                    await self._close_parts()
                self._kernel.regions.close()
                if garbage is not None:
                    garbage.end()
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return code

    def _count_live(self) -> int:
        """Return how many requests have no final response."""
        return sum(model.in_flight for model in self._kernel.catalog.executing_models())

    async def _load_and_make_doors(
        self, stop: asyncio.Event, sockets: dict[DoorKind, socket.socket], doors: list[FrontDoor]
    ) -> Exception | None:
        """Load the models of the start and put the front doors into `doors`, until the server is to stop.

        The doors listen meanwhile, or not at all. Returns why the server cannot start, if so.
        """
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:

            async def cancel_on_stop() -> None:
                await stop.wait()
                tasks.cancel_scope.cancel()

            async def make_doors() -> None:
                nonlocal failure
                try:
                    if sockets:
                        await asyncio.to_thread(_import_front_doors, sockets)
                        doors.extend(map(self._part, self._make_doors(sockets)))
                    self._owner.imported()
                    if self._options.listen_while_loading:
                        await listen(doors, loading=True)
                except (BadOption, CannotListen) as error:  # nobody need wait for the models
                    failure = error
                    tasks.cancel_scope.cancel()

            tasks.start_soon(cancel_on_stop)
            tasks.start_soon(show_loading, self._lifecycle, self._owner)
            async with anyio.create_task_group() as work:
                work.start_soon(make_doors)
                if text := await load_first_models(
                    self._kernel, self._lifecycle, self._owner, self._options.repository
                ):
                    failure = StartFailed(text)
                    tasks.cancel_scope.cancel()
            tasks.cancel_scope.cancel()
        return failure

    def _make_doors(self, sockets: dict[DoorKind, socket.socket]) -> list[FrontDoor]:
        """Return the front doors, while the models load, so that wrong options end the start at once."""
        from protocols.access import KeyReader
        from protocols.frontend import DoorParts

        keys, pool = KeyReader(), self._door_processes
        in_processes = self._options.protocols_of_front_doors
        return [
            importlib.import_module(door.module).make_door(
                DoorParts(
                    self._kernel, sock, self._options, keys,
                    pool.port(door.name) if pool is not None and door.name in in_processes else None,
                )
            )
            for door, sock in sockets.items()
        ]  # fmt: skip

    async def _open(self, doors: list[FrontDoor], ports: dict[str, int]) -> None:
        if not self._options.listen_while_loading:
            await listen(doors, loading=False)
        for door in doors:
            logger.info("Started %s", door.title)
        self._log_exposure(doors)
        self._owner.opened(self._kernel, ports)

    def _log_exposure(self, doors: list[FrontDoor]) -> None:
        """Log who may administer the server over the front doors, if any is open."""
        from protocols.access import describe_exposure

        ports = [port for door in doors if (port := door.administration) is not None]
        if ports:
            explicit = self._options.repository.control_mode == "explicit"
            exposure = describe_exposure(ports, explicit=explicit, client_shm=self._options.allow_client_shm)
            logger.log(logging.WARNING if exposure.is_warning else logging.INFO, "%s", exposure.text)

    async def _stop(self, doors: list[FrontDoor]) -> int:
        """Drain and close; returns the exit code. A second signal ends the wait."""
        grace_s = self._options.exit_timeout_s
        logger.info("Waiting for in-flight requests to complete.")  # tools of Triton wait for this line
        logger.info("Stopping: %d requests in flight get %d s (--exit-timeout-secs)", self._kernel.in_flight, grace_s)
        async with asyncio.TaskGroup() as tasks:
            for door in doors:
                tasks.create_task(door.stop(grace_s + _ANSWER_GRACE_S))
            try:
                async with asyncio.timeout(grace_s):
                    await self._kernel.drain()
            except TimeoutError:
                logger.error("failed to stop server: Internal - Exit timeout expired. Exiting immediately.")
                self._kernel.abandon()
                return 1
            finally:
                self._lifecycle.running_loads.end_all()  # no request needs them, and doors wait for their clients
        logger.info("Stopped: every accepted request got its response")
        return 0


def _output_limits(options: ServerOptions) -> OutputLimits:
    return OutputLimits(options.log.model_lines_per_s, options.log.model_bytes_per_s)


def _import_front_doors(doors: Iterable[DoorKind]) -> None:
    """Import what `_make_doors` imports. Blocks, so it runs in a thread."""
    for door in doors:
        importlib.import_module(door.module)


def _limits_of(options: ServerOptions) -> ExecutionLimits:
    """Return the limits of models that have none of their own."""
    return ExecutionLimits(
        round(options.execution_report_s * 1e9),
        round(options.execution_timeout_s * 1e9),
        "--execution-timeout",
        changeable=not options.debugging,
        response_wait_ns=round(options.response_wait_timeout_s * 1e9),
    )
