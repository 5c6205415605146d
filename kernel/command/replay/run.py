"""Sends the requests of a recording again, and compares the responses."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from kernel.command.replay.comparing import Tolerance, compare
from kernel.command.replay.schedule import DueRequest, ReplaySchedule, due_times
from kernel.recording.format import BadRecording
from kernel.recording.replayed import ReplayFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kernel.command.replay.reading import RecordedExchange, RecordingIndex
    from kernel.command.replay.report import ReplayReport
    from kernel.recording.format import RequestRecord, ResponseRecord
    from kernel.recording.replayed import ReplayTarget

#: From here on the report says that requests were sent late.
_LATE_NS = 100_000_000

CANCELLED = "cancelled"

#: Why requests are not sent, or their responses are not compared.
NO_START = "not sent: the beginning of their sequence is not in the recording"
DECOUPLED = "not sent: their model may send any number of responses, which needs gRPC (--protocol grpc)"
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

    async def run(self, progress: Callable[[], object]) -> None:
        """Send all requests; `progress` is called for each that has ended."""
        due = due_times([each.at_ns for each in self._exchanges], self._settings.speed)
        requests = [DueRequest(at, each.sequence) for at, each in zip(due, self._exchanges, strict=True)]
        schedule = ReplaySchedule(requests, self._settings.concurrency)
        begin_ns = time.monotonic_ns()
        changed = asyncio.Event()

        async def send(number: int) -> None:
            try:
                await self._send(self._exchanges[number])
            finally:
                schedule.ended(number)
                progress()
                changed.set()

        async with asyncio.TaskGroup() as tasks:
            while not schedule.ended_all:
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
        if self._settings.speed and schedule.latest_ns > _LATE_NS:
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
            report.fail(request.model, request.id, str(error))
            return
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
