"""The calls that run on the server: counted while they run, refused and ended once it stops."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

from kernel.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


class ServerShuttingDown(Unavailable):
    """An inference call came, or a stream was still open, when the server was told to stop."""

    def __init__(self) -> None:
        super().__init__("GRPC server is shutting down and has stopped accepting new requests.")


class LongCall(Protocol):
    """A call that has no end of its own: it waits for its client, or for something to happen."""

    def stop(self) -> None:
        """End soon: take nothing new, finish what was begun."""


class OpenCalls:
    """Knows every running call. `stop` ends those that would not end by themselves."""

    def __init__(self) -> None:
        self.stopping = False
        self._count = 0
        self._long_calls: set[LongCall] = set()
        self._ended = asyncio.Event()
        self._ended.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a call while the block runs."""
        self._count += 1
        self._ended.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._ended.set()

    @contextlib.contextmanager
    def stoppable(self, call: LongCall) -> Iterator[None]:
        """Let `call` be told while the block runs when the server stops."""
        self._long_calls.add(call)
        try:
            yield
        finally:
            self._long_calls.discard(call)

    def check_accepting(self) -> None:
        """Raise `ServerShuttingDown` once the server stops."""
        if self.stopping:
            raise ServerShuttingDown

    def stop(self) -> None:
        """Accept no more inference calls and tell the long calls to end."""
        self.stopping = True
        for call in tuple(self._long_calls):
            call.stop()

    async def wait_ended(self) -> None:
        """Wait until no call runs."""
        await self._ended.wait()
