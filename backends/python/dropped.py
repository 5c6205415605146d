"""Requests that a model dropped without a final answer are ended here, so that no client waits for ever.

The garbage collector reports them, possibly in the middle of any other code; so they are ended on a
thread of their own. Triton leaves such requests open.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING

from kernel.errors import InternalError, ServingError

if TYPE_CHECKING:
    from backends.worker.request import WorkerRequest


class DroppedRequests:
    """Ends requests that nobody can answer any more. `start` and `stop` it around the model's life."""

    def __init__(self, instance_name: str) -> None:
        self._error = InternalError(
            f"Python model '{instance_name}' dropped the request without sending a final response"
        )
        # SimpleQueue.put may be called by a finalizer that interrupts another put.
        self._queue: queue.SimpleQueue[tuple[WorkerRequest, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._end_all, name="dropped requests", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End what was reported so far, then the thread."""
        self._queue.put(None)
        self._thread.join()

    def add(self, request: WorkerRequest, complete: bool) -> None:
        """End `request`: `complete` says that it lacks nothing but the final flag. Takes no lock."""
        self._queue.put((request, complete))

    def _end_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            request, complete = entry
            # The worker may have ended the request meanwhile, or have lost the kernel.
            with contextlib.suppress(ServingError, OSError):
                self._end(request, complete=complete)

    def _end(self, request: WorkerRequest, *, complete: bool) -> None:
        if request.finished:
            return
        if complete:
            request.finish()
        else:
            request.fail(self._error)
