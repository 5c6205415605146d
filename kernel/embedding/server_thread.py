"""Runs a server on an event loop in its own thread, and lets other threads run code on that loop.

All posted callbacks run. After the server has ended, posting raises `NotRunning`. No thread waits forever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from kernel.app import Server, StartFailed
from kernel.errors import Unavailable
from kernel.options import BadOption
from kernel.sockets import CannotListen

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from kernel.options import ServerOptions
    from kernel.repository.load_progress import LoadStep
    from kernel.serving.catalog import Catalog
    from kernel.serving.kernel import Kernel
    from kernel.settings import LogSettings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class NotRunning(Unavailable):
    def __init__(self) -> None:
        super().__init__("the server is not running")


class ServerThread:
    """One run of a server, from start to stop. Implements `kernel.operator.ServerOperator` for a program.

    `kernel` and `ports` are set when `start` returns. Only code on the loop may use the kernel.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.kernel: Kernel
        self.ports: Mapping[str, int] = {}
        # A daemon, so that the thread does not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="naiad server", daemon=True)
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Reentrant: the garbage collector may call `stop` in a thread that already holds the lock.
        self._lock = threading.RLock()
        #: The loop while callbacks may be posted to it, else None.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested: asyncio.Event
        self._stopping = False
        self._has_served = False

    @property
    def owns_process(self) -> bool:
        return False

    # ---- for other threads -------------------------------------------------------------------

    def start(self) -> None:
        """Start the server; returns when every front door listens. On `StartFailed` the thread has ended."""
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:  # also an interrupt: the caller has no server to stop
            self.stop()
            raise

    def stop(self) -> None:
        """Drain requests, close front doors and end workers; returns when this is done. More calls do nothing."""
        with self._lock:
            self._stopping = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop_requested.set)
        # The garbage collector may call `stop` in the server's own thread, which cannot wait for itself.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def post(self, callback: Callable[[], object]) -> None:
        """Let the loop call `callback`, which must not raise. Raises `NotRunning`."""
        with self._lock:
            if self._loop is None:
                raise NotRunning
            self._loop.call_soon_threadsafe(callback)

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine on the loop and return its result. Raises `NotRunning` if the server ends first."""
        with self._lock:
            if self._loop is None:
                raise NotRunning
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise NotRunning from None

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException
        try:
            anyio.run(
                self._serve,
                backend="asyncio",
                backend_options={"use_uvloop": self.options.event_loop == "uvloop"},
            )
            failure = StartFailed("the server was stopped during its start")
        except (CannotListen, BadOption) as error:
            failure = StartFailed(str(error))
        except StartFailed as error:
            failure = error
        except BaseException as error:  # a bug; the program gets what `start` promises, and the cause beside it
            failure = StartFailed(f"the server has failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            # At the exit of the interpreter, closing the loop fails after a successful run; this is not logged.
            if self._opened.done() and not self._has_served:
                logger.exception("the server has failed")
        if not self._opened.done():
            self._opened.set_exception(failure)

    async def _serve(self) -> None:
        with self._lock:
            self._stop_requested = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            if self._stopping:
                self._stop_requested.set()
        try:
            await Server(self.options, self).run()
            self._has_served = True
        finally:
            with self._lock:
                self._loop = None
            # Callbacks that were posted before run now; coroutines are cancelled when the loop closes.
            await asyncio.sleep(0)

    # ---- ServerOperator ----------------------------------------------------------------------

    def begin(self, log: LogSettings) -> None:
        """Do nothing: the program configures logging."""

    def imported(self) -> None:
        """Do nothing: the garbage collector is the program's."""

    def lost_log_lines(self) -> int:
        return 0

    async def wait_for_stop(self, stop: asyncio.Event) -> None:
        await self._stop_requested.wait()
        stop.set()

    def models_loading(self, step: LoadStep) -> None:
        """Do nothing: `start` waits for the models."""

    def models_loaded(self, catalog: Catalog) -> None:
        """Do nothing: the program can call `EmbeddedServer.models`."""

    def model_retired(self) -> None:
        """Do nothing: the garbage collector is the program's."""

    def advice(self, catalog: Catalog, failed: Sequence[str]) -> str:
        reasons = {item.name: " ".join(item.reason.split()) for item in catalog.index() if item.name in failed}
        shown = "; ".join(f"'{name}': {reason}" for name, reason in reasons.items() if reason)
        return f"{shown}{'; ' * bool(shown)}exit_on_error=False starts without them"

    def opened(self, kernel: Kernel, ports: Mapping[str, int]) -> None:
        self.kernel = kernel
        self.ports = ports
        self._opened.set_result(None)
