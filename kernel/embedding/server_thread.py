"""Runs a server on an event loop in a thread of its own, and lets other threads call into that loop.

Whatever was posted runs, until the server has ended; then posting is refused. No thread waits for ever.
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
    from kernel.serving.catalog import Catalog
    from kernel.serving.kernel import Kernel
    from kernel.settings import LogSettings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class NotRunning(Unavailable):
    def __init__(self) -> None:
        super().__init__("the server is not running")


class ServerThread:
    """One server from its start to its end. Implements `kernel.command.terminal.ServerOperator` for a program.

    `kernel` and `ports` are there once `start` has returned; the kernel is only touched on the loop.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.kernel: Kernel
        self.ports: Mapping[str, int] = {}
        # The program may end, or forget the server, without a word: the thread keeps neither from happening.
        self._thread = threading.Thread(target=self._run, name="naiad server", daemon=True)
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        # A server can be forgotten, and so stopped, while the same thread holds another lock of this kind.
        self._lock = threading.RLock()
        #: The loop while it takes calls.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_wanted: asyncio.Event
        self._stopping = False
        self._has_served = False

    # ---- for other threads -------------------------------------------------------------------

    def start(self) -> None:
        """Start; returns when every front door listens. Raises `StartFailed`, and nothing is left then."""
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:  # also an interrupt: nobody else would stop the thread
            self.stop()
            raise

    def stop(self) -> None:
        """Drain, close and end the workers; returns when that is done. More calls do nothing."""
        with self._lock:
            self._stopping = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop_wanted.set)
        # The garbage collector may find a forgotten server in the server's own thread.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def post(self, callback: Callable[[], object]) -> None:
        """Have the loop call `callback`, which must not raise. Raises `NotRunning`."""
        with self._lock:
            if self._loop is None:
                raise NotRunning
            self._loop.call_soon_threadsafe(callback)

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine on the loop and return what it returns. Raises `NotRunning` if the server ends before."""
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
            failure = StartFailed("the server was stopped before it had started")
        except (CannotListen, BadOption) as error:
            failure = StartFailed(str(error))
        except BaseException as error:
            failure = error
            # At the end of the interpreter a loop cannot be closed any more, which then hurts nobody.
            if self._opened.done() and not self._has_served:
                logger.exception("the server has failed")
        if not self._opened.done():
            self._opened.set_exception(failure)

    async def _serve(self) -> None:
        with self._lock:
            self._stop_wanted = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            if self._stopping:
                self._stop_wanted.set()
        try:
            await Server(self.options, self).run()
            self._has_served = True
        finally:
            with self._lock:
                self._loop = None
            # What was posted until now runs before this goes on; coroutines are then cancelled with the loop.
            await asyncio.sleep(0)

    # ---- Owner -------------------------------------------------------------------------------

    def begin(self, log: LogSettings) -> None:
        """Nothing: where the log goes is the program's to say."""

    async def wait_for_stop(self, stop: asyncio.Event) -> None:
        await self._stop_wanted.wait()
        stop.set()

    def models_loaded(self, catalog: Catalog) -> None:
        """Nothing: the program can ask."""

    def advice(self, catalog: Catalog, failed: Sequence[str]) -> str:
        reasons = {item.name: " ".join(item.reason.split()) for item in catalog.index() if item.name in failed}
        shown = "; ".join(f"'{name}': {reason}" for name, reason in reasons.items() if reason)
        return f"{shown}{'; ' * bool(shown)}exit_on_error=False starts without them"

    def opened(self, kernel: Kernel, ports: Mapping[str, int]) -> None:
        self.kernel = kernel
        self.ports = ports
        self._opened.set_result(None)
