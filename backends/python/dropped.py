"""Ends the requests that a model dropped without a final response, so that no client waits forever.

The garbage collector finds them, and may do so inside any other code; so a separate thread ends them. Triton does not
end such requests. The same thread takes the responses of calls whose iterators were dropped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING

from kernel.errors import InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.worker.calls.interface import ModelCall, ModelCalls
    from backends.worker.request import WorkerRequest


class DroppedRequests:
    """Ends dropped requests in a thread, from `start` to `stop`. A model that is not used needs no thread."""

    def __init__(self, instance_name: str, calls: ModelCalls, log: Callable[[str, str], None]) -> None:
        """`log` writes a line with a level to the server's log; it may be called by any thread."""
        self._calls = calls
        self._log = log
        self._error = InternalError(
            f"Python model '{instance_name}' dropped the request without sending a final response"
        )
        # SimpleQueue.put may be called by a finalizer that interrupts another put.
        self._queue: queue.SimpleQueue[tuple[WorkerRequest, bool] | ModelCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread, unless it runs. From any thread, before there is anything that can be dropped."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._end_all, name="dropped requests", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the requests that were added, then the thread."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def add(self, request: WorkerRequest, complete: bool) -> None:
        """Let the thread end `request`. `complete`: only the final flag is missing. Uses no lock."""
        self._queue.put((request, complete))

    def call_discarder(self) -> Callable[[ModelCall], None]:
        """Start the thread and return `add_call`."""
        self.start()
        return self.add_call

    def add_call(self, call: ModelCall) -> None:
        """Let the thread take the responses of a call, which nobody takes any more. Uses no lock."""
        self._queue.put(call)

    def _end_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            # The worker may have ended the request meanwhile, or lost its connection to the kernel.
            with contextlib.suppress(ServingError, OSError):
                if isinstance(entry, tuple):
                    request, complete = entry
                    self._end(request, complete=complete)
                else:
                    self._calls.discard(entry)

    def _end(self, request: WorkerRequest, *, complete: bool) -> None:
        if request.finished:
            return
        if complete:
            request.finish()
        else:
            if not request.is_cancelled():  # else the model may drop it, and nobody waits for a response
                self._log("ERROR", self._error.message)
            request.fail(self._error)
