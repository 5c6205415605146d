"""Reads the messages from the kernel, for a worker in which each thread may wait for a message.

There is no reader thread: a thread that waits reads the socket itself. If several threads wait, one of them reads for
all. So a worker with one thread never switches threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from backends.transport import wire
from kernel.loop.busy_poll import PollPause, yield_processor

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.transport.channel import BlockingChannel

#: Of a set, it is known in one step whether it has a class.
_URGENT = frozenset(wire.kinds_of(wire.Urgent))


class KernelGone(Exception):
    """The kernel closed the connection: the worker has to end."""


class KernelMessageReader:
    """Reads messages. Those that are `wire.Urgent` are handled at once, in any thread; the others in the main one."""

    def __init__(
        self, channel: BlockingChannel, handlers: wire.Handlers, between: Callable[[], None] = lambda: None
    ) -> None:
        """`handlers` has those of urgent messages before the first message comes.

        The main thread calls `between` when it continues waiting after messages that were not for it.
        """
        self._channel = channel
        self._handlers = handlers
        self._between = between
        #: Received messages for the main thread, which takes them from here, or by `next`.
        self.waiting: deque[wire.ToWorker] = deque()
        self._gone = False
        self._reading = False
        #: Guards the two above. Only threads that wait for the reading thread use `_changed`: a condition is Python
        #: code, a lock is not.
        self._lock = threading.Lock()
        #: How long to poll before sleeping, in nanoseconds, and whether the last wait was shorter than that.
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
                if not waiting:
                    self._between()
            else:
                self.wait_until(lambda: bool(waiting))
        return waiting.popleft()

    def take_batches(self) -> list[wire.Execute]:
        """Remove and return the batches that wait for the main thread. From any thread."""
        waiting, others = self.waiting, list[wire.ToWorker]()
        taken: list[wire.Execute] = []
        with contextlib.suppress(IndexError):  # the main thread may take messages too
            while True:
                message = waiting.popleft()
                if isinstance(message, wire.Execute):
                    taken.append(message)
                else:
                    others.append(message)
        waiting.extend(others)
        return taken

    def wait_until(self, done: Callable[[], object]) -> None:
        """Read until `done()` is true. Only a message can make it true. Raises `KernelGone`."""
        while True:
            with self._lock:  # usual, and faster than the condition
                reads = not (self._reading or self._gone)
                if reads:
                    if done():
                        return
                    self._reading = True
            if reads:
                self._read(wait=True)
                continue
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
        """Receive from the channel; poll first if the last wait was short (`kernel.loop.busy_poll`)."""
        receive, poll_ns, poll = self._channel.receive, self.poll_ns, self._channel.poll
        begun_ns = time.monotonic_ns()
        now_ns, goes_on = begun_ns, self._short and begun_ns >= self._poll_pause.until_ns
        while goes_on:
            if poll(0):  # a quarter of the time of a `receive` that finds nothing
                messages = receive(wait=False)
                if messages is None or messages:
                    return messages
            now_ns, away_ns = yield_processor()
            goes_on = self._poll_pause.yielded(now_ns, away_ns) and now_ns - begun_ns < poll_ns
        messages = receive()
        self._short = time.monotonic_ns() - begun_ns < poll_ns
        return messages

    @property
    def gone(self) -> bool:
        """Whether the connection has ended: nothing is received any more."""
        return self._gone

    def poll(self) -> None:
        """Handle the messages that were received already, without waiting."""
        with self._lock:
            if self._reading or self._gone:
                return  # another thread reads and handles them, or the connection has ended
            self._reading = True
        self._read(wait=False)

    def _read(self, *, wait: bool) -> None:
        messages: list[bytes] | None = []
        try:
            messages = self._receive_soon() if wait and self.poll_ns else self._channel.receive(wait=wait)
            decode = wire.to_worker_decoder.decode
            for raw in messages or ():
                message = decode(raw)
                if type(message) is not wire.Execute and type(message) in _URGENT:
                    self._handlers[type(message)](message)
                else:
                    self.waiting.append(message)
        finally:
            with self._lock:
                self._reading = False
                self._gone = self._gone or messages is None
                if self._waiter_count:
                    self._changed.notify_all()
