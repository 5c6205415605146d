"""Whether the kernel, and a worker, poll for what comes next instead of sleeping until it comes.

To wake a process on another processor takes 5 to 50 µs, most of it on a virtual machine, and a request alone is
handed over four times: client, kernel, worker, kernel, client. So where a wait is expected to be short, whoever
waits asks again and again for a while, and gives its processor up to anybody who wants it between two askings.

A wait is expected to be as long as the last one like it: a quiet server, one with slow models and one whose
clients take their time sleep as ever. `BusyPolling` decides, `LoopPoller` asks on the event loop;
`backends.worker.mailbox` does the same in a worker.
"""

from __future__ import annotations

import asyncio
import os
import time

#: Who takes longer to give the processor back has let another process run on it.
_WANTED_NS = 5_000


class BusyPolling:
    """When the kernel polls, and whether workers may. Pure: time comes in nanoseconds that only grow."""

    def __init__(self, longest_ns: int, processor_count: int) -> None:
        """Waits longer than `longest_ns` are slept through. On a single processor, so are all: who polls there
        only keeps the others from doing what it polls for."""
        self.longest_ns = longest_ns if processor_count > 1 else 0
        self._processor_count = processor_count
        #: Requests that workers have.
        self.in_flight = 0
        #: Whether the last wait was short: for clients, and for workers.
        self._short = [False, False]
        self._for_workers = False
        self._since_ns = 0

    @property
    def worker_ns(self) -> int:
        """How long a worker may poll that is given a request now: not at all where others have work to do."""
        return self.longest_ns if self.in_flight <= self._processor_count else 0

    def woke(self, now_ns: int) -> bool:
        """A wait that was slept through is over. Returns whether to poll during the next."""
        self._short[self._for_workers] = now_ns - self._since_ns < self.longest_ns
        return self._wait(now_ns)

    def goes_on(self, now_ns: int, away_ns: int, *, moved: bool) -> bool:
        """Return whether to go on after `away_ns` without the processor; `moved`: what was waited for has come.

        With few requests in flight it may well be the one that we wait for who has the processor meanwhile. With
        many there is always somebody to run, who had better not wait for us.
        """
        if away_ns > _WANTED_NS and self.in_flight >= self._processor_count:
            self._wait(now_ns)
            return False
        if moved:
            self._short[self._for_workers] = True
            return self._wait(now_ns)
        if now_ns - self._since_ns < self.longest_ns:
            return True
        self._short[self._for_workers] = False
        return False

    def _wait(self, now_ns: int) -> bool:
        """Begin to wait; returns whether to poll."""
        self._for_workers = self.in_flight > 0
        self._since_ns = now_ns
        return self._short[self._for_workers]


class LoopPoller:
    """Keeps the running event loop from sleeping while `BusyPolling` says so, by a call in each of its turns.

    Handles of workers tell it what moves: `sent`, `answered`.
    """

    def __init__(self, polling: BusyPolling) -> None:
        self._polling = polling
        self._moved = False
        #: Whether the next move has to begin a wait: nothing polls now, and something may.
        self._asleep = polling.longest_ns > 0

    def sent(self, request_count: int) -> int:
        """A worker is given requests; returns for how many nanoseconds it may poll for more when they are done."""
        polling = self._polling
        polling.in_flight += request_count
        if self._asleep:
            self._wake()
        else:
            self._moved = True
        return polling.worker_ns

    def answered(self, request_count: int) -> None:
        """A worker has said something, and by that ended `request_count` requests."""
        self._polling.in_flight -= request_count
        if self._asleep:
            self._wake()
        else:
            self._moved = True

    def _wake(self) -> None:
        if self._polling.woke(time.monotonic_ns()):
            self._asleep = False
            self._moved = False
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        given_ns = time.monotonic_ns()
        os.sched_yield()
        now_ns = time.monotonic_ns()
        moved, self._moved = self._moved, False
        if self._polling.goes_on(now_ns, now_ns - given_ns, moved=moved):
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._asleep = True
