"""The composition root: builds the server from its parts, starts and stops it. Imports everything.

Order of start: sockets are bound, models loaded, then front doors listen, so that a client is refused
until the server can answer it (as Triton does). Order of stop: refuse, drain, close doors, end workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import anyio

from backends.launcher import LocalLauncher
from backends.supervisor import InstanceSupervisor
from kernel.catalog import Catalog
from kernel.clock import LoopClock
from kernel.errors import ServingError
from kernel.greeting import print_demo_hint, print_models_table
from kernel.inputs import InputPlacer
from kernel.observe.logs import set_up_logging
from kernel.regions import RegionRegistry
from kernel.repository.lifecycle import Lifecycle, LifecycleSettings
from kernel.router import Kernel, KernelSettings, ServerIdentity
from kernel.settings import LogSettings, LogValues, TraceSettings
from protocols.grpc.server import GrpcServer
from protocols.http.metrics import MetricsServer
from protocols.http.server import HttpServer
from schedulers.direct import direct
from schedulers.dynamic.scheduler import dynamic

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kernel.clock import Clock
    from kernel.config.spec import ModelSpec
    from kernel.events import Event
    from kernel.inbox import Inbox
    from kernel.instances import InstanceSet
    from kernel.options import Listener, ServerOptions
    from protocols.frontend import FrontDoor

logger = logging.getLogger(__name__)


#: What front doors get beyond the exit time-out, to write the errors of requests that took too long.
_ANSWER_GRACE_S = 2


#: Signals within this time of the first are the same wish to stop, not a second one.
_SAME_SIGNAL_S = 1.0


class StartFailed(Exception):
    """The server cannot start; the message is one line."""


def serve(options: ServerOptions) -> int:
    """Run the server until it is told to stop; returns the exit code."""
    try:
        return anyio.run(
            Server(options).run,
            backend="asyncio",
            backend_options={"use_uvloop": options.event_loop == "uvloop"},
        )
    except StartFailed as error:
        print(f"error: creating server: {error}", file=sys.stderr)
        return 1


def choose_scheduler(
    spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock
) -> Coroutine[int | None, Event, None]:
    """Return the scheduler that a model's configuration asks for."""
    schedule = dynamic if spec.dynamic_batching is not None else direct
    return schedule(spec, inbox, instances, clock)


class Server:
    """The whole server of one process."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._log = LogSettings(
            LogValues(
                log_info=options.log.info,
                log_warning=options.log.warning,
                log_error=options.log.error,
                log_verbose_level=options.log.verbose,
                log_format=options.log.format,
            )
        )

    async def run(self) -> int:
        """Start, serve, stop. Returns the exit code."""
        set_up_logging(self._log)
        with contextlib.ExitStack() as stack:
            sockets = {
                name: stack.enter_context(_bind(title, listener))
                for name, title, listener in (
                    ("http", "HTTP", self._options.http_listener),
                    ("grpc", "GRPC", self._options.grpc_listener),
                    ("metrics", "metrics", self._options.metrics_listener),
                )
                if listener.allow
            }
            self._build()
            return await self._run_until_signal(sockets)

    def _build(self) -> None:
        options = self._options
        catalog, regions, clock = Catalog(), RegionRegistry(), LoopClock()
        settings = KernelSettings(
            trace=TraceSettings(),
            log=self._log,
            identity=ServerIdentity(name=options.server_id),
            strict_readiness=options.strict_readiness,
            allow_client_shm=options.allow_client_shm,
        )
        self._kernel = Kernel(catalog, regions, InputPlacer(regions, options.arena_byte_size), clock, settings)
        launcher = LocalLauncher()
        self._lifecycle = Lifecycle(
            catalog,
            clock,
            choose_scheduler,
            lambda: InstanceSupervisor(launcher, arena_byte_size=options.arena_byte_size, verbose=options.log.verbose),
            LifecycleSettings(
                repositories=options.repository.paths,
                explicit=options.repository.control_mode == "explicit",
                auto_complete=options.repository.auto_complete_config,
            ),
        )
        self._kernel.repository = self._lifecycle

    async def _run_until_signal(self, sockets: dict[str, socket.socket]) -> int:
        stop = asyncio.Event()
        failure = ""
        code = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_wait_for_signals, stop)
            try:
                failure = await self._load_unless(stop)
                if not failure and not stop.is_set():
                    doors = await self._open_doors(sockets)
                    await stop.wait()
                    code = await self._stop(doors)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._lifecycle.close(at_once=bool(code))
                self._kernel.regions.close()
                tasks.cancel_scope.cancel()
        if failure:
            raise StartFailed(failure)
        return code

    async def _load_unless(self, stop: asyncio.Event) -> str:
        """Load the models of the start, until a signal comes; returns why the server cannot start, if so."""
        failure = ""
        async with anyio.create_task_group() as tasks:

            async def cancel_on_stop() -> None:
                await stop.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(cancel_on_stop)
            failure = await self._load()
            tasks.cancel_scope.cancel()
        return failure

    async def _load(self) -> str:
        """Load the models of the start and show what became of them."""
        try:
            failed = await self._lifecycle.start(self._options.repository.load_models)
        except ServingError as error:
            return f"{error.code.title} - {error.message}"
        print_models_table(self._kernel.catalog)
        if failed and self._options.repository.exit_on_error:
            return (
                f"Internal - failed to load all models: {', '.join(failed)} (see the table above; "
                "--exit-on-error=false starts without them)"
            )
        return ""

    async def _open_doors(self, sockets: dict[str, socket.socket]) -> list[FrontDoor]:
        doors: list[FrontDoor] = []
        if "grpc" in sockets:
            doors.append(GrpcServer(self._kernel, sockets["grpc"]))
        if "http" in sockets:
            doors.append(HttpServer(self._kernel, sockets["http"], max_input_size=self._options.http.max_input_size))
        if "metrics" in sockets:
            doors.append(MetricsServer(self._kernel, sockets["metrics"]))
        for door in doors:
            await door.start()
            logger.info("Started %s", door.title)
        # What exists now lives as long as the server: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        if self._options.demo and "http" in sockets:
            print_demo_hint(sockets["http"].getsockname()[1])
        return doors

    async def _stop(self, doors: list[FrontDoor]) -> int:
        """Drain and close; returns the exit code. A second signal ends the wait."""
        grace_s = self._options.exit_timeout_s
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
        logger.info("Stopped: every accepted request was answered")
        return 0


async def _wait_for_signals(stop: asyncio.Event) -> None:
    first_s = 0.0
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for number in received:
            if stop.is_set():
                # make and other parents pass a signal on that the terminal has sent us as well.
                if time.monotonic() - first_s < _SAME_SIGNAL_S:
                    continue
                logger.warning("Signal (%d) received again: exiting at once", number)
                os._exit(1)  # workers die with their parent
            logger.info("Signal (%d) received.", number)
            first_s = time.monotonic()
            stop.set()


def _bind(title: str, listener: Listener) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises `StartFailed`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listener.address, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartFailed(f"Unavailable - {title} address '{listener.address}': {error.strerror}") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setblocking(False)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise StartFailed(
            f"Unavailable - Socket '{listener.address}:{listener.port}' for {title}: {error.strerror}. "
            f"Choose another port with --{title.lower()}-port"
        ) from None
    return sock
