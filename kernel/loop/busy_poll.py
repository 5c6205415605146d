"""Whether the kernel, and a worker, poll for what comes next instead of sleeping until it comes.

To wake a process on another processor takes 5 to 50 µs, most of it on a virtual machine, and a request alone is
handed over four times: client, kernel, worker, kernel, client. So where a wait is expected to be short, whoever
waits asks again and again for a while, and gives its processor up to anybody who wants it between two askings.
Where others want it all the time, nobody polls.

A wait is expected to be as long as the last one like it: a quiet server, one with slow models and one whose
clients take their time sleep as ever. `BusyPolling` decides, `LoopPoller` asks on the event loop;
`backends.worker.mailbox` does the same in a worker, and `kernel.loop.clock` for the time that a scheduler waits for.
"""

from __future__ import annotations

import asyncio
import os
import time

#: Who takes longer to give the processor back has let another process run on it.
_WANTED_NS = 5_000

#: With more requests in flight for each processor than these, there is always work, and asking for more costs time.
_MOST_PER_PROCESSOR = 4

#: Somebody who takes the processor for so long is not the one that we wait for.
BUSY_NS = 300_000

#: It may be the host of a virtual machine, now and then. A process that computes takes it again and again: so much
#: time in all, or so much more than one part in so many of the time that has passed.
BUSY_SUM_NS = 8_000_000
BUSY_PARTS = 64

#: For how long polling ends then: at first, and at most.
_FIRST_PAUSE_NS = 100_000_000
_LONGEST_PAUSE_NS = 1_600_000_000

#: A pause is short again when it went well before for as long as so many of the last one.
GOOD_PAUSES = 10


def give_way() -> tuple[int, int]:
    """Give the processor up once. Returns the time after it, and for how long it was away, in nanoseconds."""
    given_ns = time.monotonic_ns()
    os.sched_yield()
    now_ns = time.monotonic_ns()
    return now_ns, now_ns - given_ns


class GivingWay:
    """Ends polling for a while where the processors are busy. Pure.

    A process that was asleep gets a busy processor at once when it is woken; one that polled and gave it up waits for
    its turn, some milliseconds. Pauses grow while one follows soon on the other.
    """

    def __init__(self) -> None:
        self._pause_ns = _FIRST_PAUSE_NS
        #: For how long others took the processor beyond what they may, and when that was counted.
        self._taken_ns = 0
        self._counted_ns = 0
        #: Nobody polls before.
        self.until_ns = 0

    def gave(self, now_ns: int, away_ns: int) -> bool:
        """The processor was given up for `away_ns`. Returns whether to go on."""
        if away_ns < BUSY_NS:
            return True
        self._taken_ns = away_ns + max(0, self._taken_ns - (now_ns - self._counted_ns) // BUSY_PARTS)
        self._counted_ns = now_ns
        if self._taken_ns < BUSY_SUM_NS:
            return True
        self._taken_ns = 0
        soon = now_ns - self.until_ns < GOOD_PAUSES * self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _LONGEST_PAUSE_NS) if soon else _FIRST_PAUSE_NS
        self.until_ns = now_ns + self._pause_ns
        return False


class BusyPolling:
    """When the kernel polls, and whether workers may. Pure: time comes in nanoseconds that only grow."""

    def __init__(self, longest_ns: int, processor_count: int) -> None:
        """Waits longer than `longest_ns` are slept through. On a single processor, so are all: who polls there
        only keeps the others from doing what it polls for."""
        self.longest_ns = longest_ns if processor_count > 1 else 0
        self._processor_count = processor_count
        #: The most requests in flight with which anybody polls.
        self.most_in_flight = _MOST_PER_PROCESSOR * processor_count
        self._giving_way = GivingWay()
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
        # Asked for each request and each answer while nobody polls, so without a call.
        self._short[self._for_workers] = now_ns - self._since_ns < self.longest_ns
        self._since_ns = now_ns
        self._for_workers = self.in_flight > 0
        return self._short[self._for_workers] and now_ns >= self._giving_way.until_ns

    def goes_on(self, now_ns: int, away_ns: int, *, moved: bool) -> bool:
        """Return whether to go on after `away_ns` without the processor; `moved`: what was waited for has come.

        With few requests in flight it may well be the one that we wait for who has the processor meanwhile. With
        many there is always somebody to run, who had better not wait for us.
        """
        if away_ns > _WANTED_NS:
            goes_on = self._giving_way.gave(now_ns, away_ns)
            if not goes_on or self.in_flight >= self._processor_count:
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
        return self._short[self._for_workers] and now_ns >= self._giving_way.until_ns


class LoopPoller:
    """Keeps the running event loop from sleeping while `BusyPolling` says so, by a call in each of its turns.

    Handles of workers tell it what moves.
    """

    def __init__(self, polling: BusyPolling) -> None:
        self.polling = polling
        self._moved = False
        self._loop: asyncio.AbstractEventLoop
        #: Whether the next move has to begin a wait: nothing polls now, and something may.
        self._asleep = polling.longest_ns > 0

    def moved(self, more_requests: int) -> None:
        """Something went to a worker, or came from one, which has `more_requests` by that: fewer are negative."""
        polling = self.polling
        polling.in_flight += more_requests
        if not self._asleep:
            self._moved = True
        elif polling.in_flight <= polling.most_in_flight:
            self._wake()

    def _wake(self) -> None:
        if self.polling.woke(time.monotonic_ns()):
            self._asleep = False
            self._moved = False
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now_ns, away_ns = give_way()
        moved, self._moved = self._moved, False
        if self.polling.goes_on(now_ns, away_ns, moved=moved):
            self._loop.call_soon(self._turn)
        else:
            self._asleep = True
