"""Messages from the kernel, for a worker whose threads all may wait for one.

There is no reader thread: whoever waits reads. Of several waiting threads one reads for all, so that
a worker with one thread pays for no hand-over between threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from backends.transport import wire
from kernel.loop.busy_poll import PollPause, yield_processor

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.transport.channel import BlockingChannel

#: Handled by whoever reads them; all others wait for the main thread, in order.
_URGENT = frozenset({wire.Cancel, wire.Credit, wire.FreeBlocks})


class KernelGone(Exception):
    """The kernel closed the connection: the worker has nothing left to live for."""


class Mailbox:
    """Receives messages; `urgent` is called with those that must not wait, from any thread."""

    def __init__(self, channel: BlockingChannel, urgent: Callable[[wire.ToWorker], None]) -> None:
        self._channel = channel
        self._urgent = urgent
        #: Messages for the main thread that have come; it takes them here, or from `next`.
        self.waiting: deque[wire.ToWorker] = deque()
        self._gone = False
        self._reading = False
        #: Guards the two above. `_changed` is entered only by threads that wait for the one that reads: a
        #: condition is Python code, a lock is not.
        self._lock = threading.Lock()
        #: For how many nanoseconds to poll before sleeping, and whether the last wait was as short.
        self.poll_ns = 0
        self._short = False
        self._poll_pause = PollPause()
        self._changed = threading.Condition(self._lock)
        self._waiter_count = 0

    def next(self) -> wire.ToWorker:
        """Wait for the next message for the main thread. Raises `KernelGone`."""
        waiting = self.waiting
        while not waiting:
            with self._lock:
                reads = not (self._reading or self._gone)
                self._reading = self._reading or reads
            if reads:
                self._read(wait=True)
            else:
                self.wait_until(lambda: bool(waiting))
        return waiting.popleft()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Read until `done()`, which only messages make true. Raises `KernelGone`."""
        while True:
            with self._changed:
                self._waiter_count += 1
                while self._reading and not done():
                    self._changed.wait()
                self._waiter_count -= 1
                if done():
                    return
                if self._gone:
                    raise KernelGone
                self._reading = True
            self._read(wait=True)

    def _receive_soon(self) -> list[bytes] | None:
        """Receive as the channel does; poll first where the last wait was short (`kernel.loop.busy_poll`)."""
        receive, poll_ns = self._channel.receive, self.poll_ns
        begun_ns = time.monotonic_ns()
        now_ns, goes_on = begun_ns, self._short and begun_ns >= self._poll_pause.until_ns
        while goes_on:
            messages = receive(wait=False)
            if messages is None or messages:
                return messages
            now_ns, away_ns = yield_processor()
            goes_on = self._poll_pause.yielded(now_ns, away_ns) and now_ns - begun_ns < poll_ns
        messages = receive()
        self._short = time.monotonic_ns() - begun_ns < poll_ns
        return messages

    def poll(self) -> None:
        """Handle what has come already, without waiting."""
        with self._lock:
            if self._reading or self._gone:
                return  # whoever reads handles it, or nothing comes any more
            self._reading = True
        self._read(wait=False)

    def _read(self, *, wait: bool) -> None:
        messages: list[bytes] | None = []
        try:
            messages = self._receive_soon() if wait and self.poll_ns else self._channel.receive(wait=wait)
            decode = wire.to_worker_decoder.decode
            for raw in messages or ():
                message = decode(raw)
                if type(message) in _URGENT:
                    self._urgent(message)
                else:
                    self.waiting.append(message)
        finally:
            with self._lock:
                self._reading = False
                self._gone = self._gone or messages is None
                if self._waiter_count:
                    self._changed.notify_all()
