"""Busy polling: the kernel and the workers poll for the next message, instead of sleeping, if it is expected soon.

Waking a process on another processor takes 5 to 50 µs, longest on virtual machines. A single request is passed on four
times: client, kernel, worker, kernel, client. So a process that expects a short wait polls for a while, and yields its
processor to other processes between two polls. If others need the processors all the time, polling pauses.

The expected length of a wait is that of the last wait of the same kind. So a server that is idle, or that has slow
models or slow clients, sleeps as without polling. Nothing polls while all workers with requests execute slow models.
`BusyPolling` decides, `LoopPoller` polls on the event loop,
`backends.worker.message_reader` in workers, and `kernel.loop.clock` for the alarms of schedulers.
"""

from __future__ import annotations

import asyncio
import os
import time

#: A yield that takes longer than this has let another process run.
_OTHER_RAN_NS = 5_000

#: With more requests in flight per processor than this there is always work, and polling only costs time.
_MAX_IN_FLIGHT_PER_PROCESSOR = 4

#: The peer that we wait for works for a shorter time than this. A longer yield counts as a busy processor.
BUSY_NS = 300_000

#: Polling pauses when the long yields add up to this time. Of the sum, 1/`BUSY_DIVISOR` of the elapsed time is
#: subtracted: the host of a virtual machine takes the processor now and then, a computing process again and again.
BUSY_SUM_NS = 8_000_000
BUSY_DIVISOR = 64

#: The first pause and the longest pause of polling.
FIRST_PAUSE_NS = 100_000_000
LONGEST_PAUSE_NS = 1_600_000_000

#: A pause has the first length again if polling worked for this many times the last pause.
GOOD_PAUSES = 10


def yield_processor() -> tuple[int, int]:
    """Let other processes run once. Returns the time after that, and how long they ran, in nanoseconds."""
    yielded_ns = time.monotonic_ns()
    os.sched_yield()
    now_ns = time.monotonic_ns()
    return now_ns, now_ns - yielded_ns


class PollPause:
    """Pauses polling while the processors are busy. Pure.

    On a busy processor, Linux runs a process that slept as soon as it is woken. A process that polls and yields waits
    some milliseconds for its next time slice. A pause that follows soon after another is twice as long.
    """

    def __init__(self) -> None:
        self._pause_ns = FIRST_PAUSE_NS
        #: The sum of long yields, see `BUSY_SUM_NS`, and the time when it was last changed.
        self._taken_ns = 0
        self._counted_ns = 0
        #: Polling pauses until this time.
        self.until_ns = 0

    def yielded(self, now_ns: int, away_ns: int) -> bool:
        """Count a yield of `away_ns` that ended at `now_ns`. Returns whether to continue polling."""
        if away_ns < BUSY_NS:
            return True
        self._taken_ns = away_ns + max(0, self._taken_ns - (now_ns - self._counted_ns) // BUSY_DIVISOR)
        self._counted_ns = now_ns
        if self._taken_ns < BUSY_SUM_NS:
            return True
        self._taken_ns = 0
        soon = now_ns - self.until_ns < GOOD_PAUSES * self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS) if soon else FIRST_PAUSE_NS
        self.until_ns = now_ns + self._pause_ns
        return False


class BusyPolling:
    """Decides when the kernel polls, and for how long workers may. Pure: callers pass in monotonic nanoseconds."""

    def __init__(self, longest_ns: int, processor_count: int) -> None:
        """The kernel sleeps during waits longer than `longest_ns`, and on a single processor during all waits:
        there, polling would only take time from the process that it waits for."""
        self.longest_ns = longest_ns if processor_count > 1 else 0
        self._processor_count = processor_count
        #: With more requests in flight nothing polls.
        self.max_in_flight = _MAX_IN_FLIGHT_PER_PROCESSOR * processor_count
        self._pause = PollPause()
        #: The number of requests that workers have, of workers that have requests, and of slow ones among these
        #: (`worker_ends`). A worker's handle counts its worker when the first request is sent.
        self.in_flight = 0
        self.busy_workers = 0
        self.slow_workers = 0
        #: Whether the last wait was short; [0] for waits for clients, [1] for waits for workers.
        self._short = [False, False]
        self._for_workers = False
        self._since_ns = 0

    @property
    def worker_ns(self) -> int:
        """How long a worker may poll after the request that it gets now; 0 if other workers need the processors."""
        return self.longest_ns if self.in_flight <= self._processor_count else 0

    def worker_ends(self, execution_ns: int, *, slow: bool) -> bool:
        """A worker has no request any more: the one that counted it in `busy_workers` and, if `slow`, in
        `slow_workers`. Returns whether it is slow next time; it executes for `execution_ns` on average.

        While only slow workers have requests nothing polls: requests and messages that come meanwhile are soon there,
        but what everybody waits for is not, and a process that polls takes time and caches from one that computes.
        """
        self.busy_workers -= 1
        self.slow_workers -= slow
        return 2 * execution_ns > self.longest_ns

    def woke(self, now_ns: int) -> bool:
        """Return whether to poll during the next wait. Called after a wait without polling."""
        # Repeats `_begin_wait` to save a call: without polling, this runs for each request and each response.
        self._short[self._for_workers] = now_ns - self._since_ns < self.longest_ns
        self._since_ns = now_ns
        self._for_workers = self.in_flight > 0
        return (
            self._short[self._for_workers]
            and (not self.busy_workers or self.slow_workers < self.busy_workers <= self._processor_count)
            and now_ns >= self._pause.until_ns
        )

    def keeps_polling(self, now_ns: int, away_ns: int, *, moved: bool) -> bool:
        """Return whether to continue polling after a yield of `away_ns`; `moved`: a message came or went meanwhile.

        With few requests in flight, the process that ran during the yield is likely the one that we wait for. With
        many, other processes always have work, and polling would delay them.
        """
        if away_ns > _OTHER_RAN_NS:
            keeps_polling = self._pause.yielded(now_ns, away_ns)
            if not keeps_polling or self.in_flight >= self._processor_count:
                self._begin_wait(now_ns)
                return False
        if moved:
            self._short[self._for_workers] = True
            return self._begin_wait(now_ns)
        if now_ns - self._since_ns < self.longest_ns:
            return True
        self._short[self._for_workers] = False
        return False

    def _begin_wait(self, now_ns: int) -> bool:
        """Begin the next wait. Returns whether to poll during it."""
        self._for_workers = self.in_flight > 0
        self._since_ns = now_ns
        return (
            self._short[self._for_workers]
            and (not self.busy_workers or self.slow_workers < self.busy_workers <= self._processor_count)
            and now_ns >= self._pause.until_ns
        )


class LoopPoller:
    """Keeps the event loop from sleeping while `BusyPolling` polls: it schedules a callback in each iteration.

    Worker handles report every message to and from their workers.
    """

    def __init__(self, polling: BusyPolling) -> None:
        self.polling = polling
        self._moved = False
        self._loop: asyncio.AbstractEventLoop
        #: Polling is enabled, but not running: the next message decides whether it starts.
        self._asleep = polling.longest_ns > 0

    def moved(self, request_delta: int) -> None:
        """Report a message to or from a worker, which changes the worker's number of requests by `request_delta`."""
        polling = self.polling
        polling.in_flight += request_delta
        if not self._asleep:
            self._moved = True
        elif polling.in_flight <= polling.max_in_flight:
            self._wake()

    def _wake(self) -> None:
        if self.polling.woke(time.monotonic_ns()):
            self._asleep = False
            self._moved = False
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        now_ns, away_ns = yield_processor()
        moved, self._moved = self._moved, False
        if self.polling.keeps_polling(now_ns, away_ns, moved=moved):
            self._loop.call_soon(self._poll)
        else:
            self._asleep = True
