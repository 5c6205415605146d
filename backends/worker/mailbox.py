"""Messages from the kernel, for a worker whose threads all may wait for one.

There is no reader thread: whoever waits reads. Of several waiting threads one reads for all, so that
a worker with one thread pays for no hand-over between threads.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from backends import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.channel import BlockingChannel

#: Handled by whoever reads them; all others wait for the main thread, in order.
_URGENT = (wire.Cancel, wire.Credit, wire.FreeBlocks)


class KernelGone(Exception):
    """The kernel closed the connection: the worker has nothing left to live for."""


class Mailbox:
    """Receives messages; `urgent` is called with those that must not wait, from any thread."""

    def __init__(self, channel: BlockingChannel, urgent: Callable[[wire.ToWorker], None]) -> None:
        self._channel = channel
        self._urgent = urgent
        self._queue: deque[wire.ToWorker] = deque()
        self._gone = False
        self._reading = False
        self._changed = threading.Condition()

    @property
    def has_next(self) -> bool:
        """Whether `next` returns at once."""
        return bool(self._queue)

    def next(self) -> wire.ToWorker:
        """Wait for the next message for the main thread. Raises `KernelGone`."""
        if not self._queue:
            self.wait_until(lambda: bool(self._queue))
        return self._queue.popleft()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Read until `done()`, which only messages make true. Raises `KernelGone`."""
        while True:
            with self._changed:
                while self._reading and not done():
                    self._changed.wait()
                if done():
                    return
                if self._gone:
                    raise KernelGone
                self._reading = True
            self._read(wait=True)

    def poll(self) -> None:
        """Handle what has come already, without waiting."""
        with self._changed:
            if self._reading or self._gone:
                return  # whoever reads handles it, or nothing comes any more
            self._reading = True
        self._read(wait=False)

    def _read(self, *, wait: bool) -> None:
        messages: list[bytes] | None = []
        try:
            messages = self._channel.receive(wait=wait)
            for raw in messages or ():
                message = wire.to_worker_decoder.decode(raw)
                if isinstance(message, _URGENT):
                    self._urgent(message)
                else:
                    self._queue.append(message)
        finally:
            with self._changed:
                self._reading = False
                self._gone = self._gone or messages is None
                self._changed.notify_all()
