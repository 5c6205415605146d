"""Asks a worker whether its model is healthy, for `kernel.serving.health`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from backends.transport import wire
from backends.transport.texts import shortened

if TYPE_CHECKING:
    from collections.abc import Callable

#: How long the worker may take (Triton).
CHECK_TIMEOUT_S = 5.0


class WorkerHealthCheck:
    """Asks the model whether it is ready. While one check runs, all who ask wait for its result (Triton)."""

    def __init__(self, name: str, send: Callable[[wire.ToWorker], None], is_busy: Callable[[], bool]) -> None:
        """`is_busy` says whether the worker executes, so that it may not respond soon."""
        self._name = name
        self._send = send
        self._is_busy = is_busy
        self._number = 0
        #: The result of the check that the worker was asked for; None while there is none.
        self._pending: asyncio.Future[str] | None = None
        self._last = ""
        self._ended = False

    async def problem(self) -> str:
        """See `HealthCheck`. While the worker executes for longer than the time limit, its last response counts."""
        if self._ended:
            return f"Model '{self._name}' is not ready: its worker has ended."
        pending = self._pending
        if pending is None:
            self._number += 1
            pending = self._pending = asyncio.get_running_loop().create_future()
            self._send(wire.CheckHealth(self._number))
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await asyncio.shield(pending)
        except TimeoutError:
            if self._is_busy():
                return self._last
            return f"Model '{self._name}' is not ready: is_ready() did not return within {CHECK_TIMEOUT_S:g} s."

    def responded(self, number: int, problem: str) -> None:
        """The worker has responded. Raises ValueError unless it was asked."""
        if self._pending is None or number != self._number:
            raise ValueError(f"a response to health check {number}, which was not asked for")
        self._last = shortened(problem)
        self._pending.set_result(self._last)
        self._pending = None

    def end(self) -> None:
        """The worker has ended."""
        self._ended = True
        if self._pending is not None:
            self._pending.set_result(f"Model '{self._name}' is not ready: its worker has ended.")
            self._pending = None
