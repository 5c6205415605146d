"""Sends the requests of a recording again, and compares the responses."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from kernel.command.replay.comparing import Tolerance, compare
from kernel.command.replay.schedule import DueRequest, ReplaySchedule, due_times
from kernel.recording.format import BadRecording
from kernel.recording.replayed import ReplayFailed, TargetLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kernel.command.replay.reading import RecordedExchange, RecordingIndex
    from kernel.command.replay.report import ReplayReport
    from kernel.recording.format import RequestRecord, ResponseRecord
    from kernel.recording.replayed import ReplayTarget

#: From here on the report says that requests were sent late.
_LATE_NS = 100_000_000

#: After this many requests in a row whose connections failed, the target is taken to be gone.
MOST_LOST = 50

CANCELLED = "cancelled"

#: Why requests are not sent, or their responses are not compared.
NO_START = "not sent: the beginning of their sequence is not in the recording"
DECOUPLED = "not sent: the model may send any number of responses, which needs gRPC (--protocol grpc)"
NO_VALUES = "not sent: values of their inputs are not in the recording (a client's region, a digest, or too large)"
UNFINISHED = "not compared: they have no final response in the recording"
WAS_CANCELLED = "not compared: their clients had cancelled them"


class ReplaySettings(msgspec.Struct, frozen=True):
    """How requests are sent and compared."""

    #: 2 takes half of the recorded time, 0 no pauses.
    speed: float = 1.0
    #: The most requests in flight.
    concurrency: int = 64
    tolerance: Tolerance = Tolerance()
    #: Seconds until a request counts as failed.
    timeout_s: float = 300.0
    #: Seconds between two requests at most.
    longest_pause_s: float = 60.0


class Replay:
    """One replay of a recording."""

    def __init__(
        self, index: RecordingIndex, target: ReplayTarget, settings: ReplaySettings, report: ReplayReport
    ) -> None:
        """Results go to `report`."""
        self._index = index
        self._target = target
        self._settings = settings
        self._report = report
        self._exchanges = list(_with_starts(index.exchanges, report))
        #: How many requests will be sent, or are found not to be sendable, and how many of them have ended.
        self.total = len(self._exchanges)
        self._ended = 0
        #: How many connections have failed since the last response.
        self._lost_in_row = 0

    async def leave_out_missing(self) -> None:
        """Ask the target for the models, and leave out requests to those that it has not. Raises `ReplayFailed`."""
        missing = self._report.missing
        for model, count in Counter(each.model for each in self._exchanges).items():
            if not await self._target.serves(model):
                missing[model] = count
        self._exchanges = [each for each in self._exchanges if each.model not in missing]
        self.total = len(self._exchanges)

    def due_ns(self) -> list[int]:
        """Return when the requests are sent, in nanoseconds from the first one."""
        times = [each.at_ns for each in self._exchanges]
        return due_times(times, self._settings.speed, round(self._settings.longest_pause_s * 1e9))

    async def run(self, progress: Callable[[], object]) -> None:
        """Send all requests; `progress` is called for each that has ended.

        If it is cancelled, the report says how far it has come.
        """
        try:
            await self._send_all(progress)
        except asyncio.CancelledError:
            self._stop("by the keyboard")
            raise

    def _stop(self, why: str) -> None:
        self._report.stopped = f"{why}, after {self._ended} of {self.total} requests"

    async def _send_all(self, progress: Callable[[], object]) -> None:
        due = self.due_ns()
        requests = [DueRequest(at, each.sequence) for at, each in zip(due, self._exchanges, strict=True)]
        schedule = ReplaySchedule(requests, self._settings.concurrency)
        begin_ns = time.monotonic_ns()
        changed = asyncio.Event()

        async def send(number: int) -> None:
            try:
                await self._send(self._exchanges[number])
            finally:
                schedule.ended(number)
                self._ended += 1
                progress()
                changed.set()

        async with asyncio.TaskGroup() as tasks:
            while not schedule.ended_all:
                if self._lost_in_row >= MOST_LOST:
                    self._stop("the target does not respond any more")
                    return
                changed.clear()
                while (number := schedule.take(time.monotonic_ns() - begin_ns)) is not None:
                    tasks.create_task(send(number))
                next_ns = schedule.next_due_ns()
                try:
                    async with asyncio.timeout(
                        None if next_ns is None else max(0, next_ns + begin_ns - time.monotonic_ns()) / 1e9
                    ):
                        await changed.wait()
                except TimeoutError:
                    pass  # the next request is due
        if not self._settings.speed:
            self._report.notes.append(
                f"requests were sent without pauses, {self._settings.concurrency} at a time: the latencies of now "
                "are not those of the recorded load"
            )
        elif schedule.latest_ns > _LATE_NS:
            self._report.notes.append(
                f"requests were sent up to {schedule.latest_ns / 1e9:.1f} s after their time: the target, this "
                "program or --concurrency was too small for the recorded rate"
            )

    async def _send(self, exchange: RecordedExchange) -> None:
        report = self._report
        try:
            request, recorded = self._index.load(exchange)
        except BadRecording as error:
            report.skipped[f"not sent: {error}"] += 1
            return
        if request.decoupled and not self._target.takes_decoupled:
            report.skipped[DECOUPLED] += 1
            return
        if any(tensor.byte_size and tensor.data is None for tensor in request.inputs):
            report.skipped[NO_VALUES] += 1
            return
        begin_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                found = await self._target.send(request)
        except TimeoutError:
            report.fail(request.model, request.id, f"no response within {self._settings.timeout_s:g} s")
            return
        except ReplayFailed as error:
            self._lost_in_row += isinstance(error, TargetLost)
            report.fail(request.model, request.id, str(error))
            return
        self._lost_in_row = 0
        took_ns = time.monotonic_ns() - begin_ns
        if not exchange.complete:
            report.skipped[UNFINISHED] += 1
        elif recorded and recorded[-1].code == CANCELLED:
            report.skipped[WAS_CANCELLED] += 1
        else:
            comparison = compare(recorded, found, self._settings.tolerance)
            report.add(request.model, request.id, comparison, _recorded_ns(request, recorded), took_ns)


def _recorded_ns(request: RequestRecord, responses: Sequence[ResponseRecord]) -> int | None:
    """Return how long the server took from the request to its last response; None for errors."""
    if any(each.error for each in responses):
        return None
    return responses[-1].at_ns - request.at_ns


def _with_starts(exchanges: Sequence[RecordedExchange], report: ReplayReport) -> Iterator[RecordedExchange]:
    """Yield the exchanges without requests of sequences whose beginning is not there."""
    begun = set()
    for exchange in exchanges:
        if exchange.sequence is not None:
            if exchange.sequence_start:
                begun.add(exchange.sequence)
            elif exchange.sequence not in begun:
                report.skipped[NO_START] += 1
                continue
        yield exchange
