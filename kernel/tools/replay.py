"""`naiad replay`: sends the requests of a recording to a server and says what differs.

Each request is sent at its time, in its sequence, and not too many at once; responses are compared with the recorded
ones (`replay_report.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec
import typer

from kernel.records.recording_format import BadRecording
from kernel.records.replay_target import ReplayFailed, TargetLost
from kernel.tools.client import ClientError, base_url, speaks_http2
from kernel.tools.printing import progress_bar
from kernel.tools.recordings import RecordingIndex, recording_byte_size
from kernel.tools.replay_report import ReplayReport, Tolerance, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from pathlib import Path

    from kernel.records.recording_format import RequestRecord, ResponseRecord
    from kernel.records.replay_target import ReplayTarget
    from kernel.tools.recordings import RecordedExchange


class DueRequest(msgspec.Struct, frozen=True):
    """When a request is due, in nanoseconds from the beginning, and the sequence that it belongs to."""

    due_ns: int
    sequence: Hashable = None


def due_times(at_ns: Sequence[int], speed: float, longest_pause_ns: int) -> list[int]:
    """Return when requests are due that the server received at these times, in their order.

    `speed` 2 takes half of the time, 0 sends without pauses. No pause is longer than `longest_pause_ns`: between two
    requests may be the night, or days without a server.
    """
    if not speed or not at_ns:
        return [0] * len(at_ns)
    due, found = 0.0, []
    before_ns = at_ns[0]
    for each_ns in at_ns:
        due += min((each_ns - before_ns) / speed, longest_pause_ns)
        before_ns = each_ns
        found.append(round(due))
    return found


class ReplaySchedule:
    """Says which request is next. Requests of a sequence wait for one another, so that they keep their order."""

    def __init__(self, requests: Sequence[DueRequest], concurrency: int) -> None:
        """`requests` are in the order of their times. At most `concurrency` are in flight."""
        self._requests = requests
        self._concurrency = concurrency
        #: The next one that was not looked at.
        self._next = 0
        self._running = 0
        #: Sequences with a request in flight, and which of their requests wait for it.
        self._sequences: dict[Hashable, deque[int]] = {}
        #: Requests whose sequences have become free.
        self._freed: deque[int] = deque()
        #: The most nanoseconds that a request was started after its time.
        self.latest_ns = 0

    @property
    def ended_all(self) -> bool:
        """Whether every request was taken and has ended."""
        return self._next == len(self._requests) and not self._running and not self._freed

    def take(self, now_ns: int) -> int | None:
        """Return the index of a request to be sent now; None if there is none."""
        if self._running >= self._concurrency:
            return None
        if self._freed:
            return self._started(self._freed.popleft(), now_ns)
        while self._next < len(self._requests) and self._requests[self._next].due_ns <= now_ns:
            index, self._next = self._next, self._next + 1
            sequence = self._requests[index].sequence
            if sequence is not None:
                if sequence in self._sequences:
                    self._sequences[sequence].append(index)
                    continue
                self._sequences[sequence] = deque()
            return self._started(index, now_ns)
        return None

    def _started(self, index: int, now_ns: int) -> int:
        self._running += 1
        self.latest_ns = max(self.latest_ns, now_ns - self._requests[index].due_ns)
        return index

    def ended(self, index: int) -> None:
        """The request has its last response, or could not be sent."""
        self._running -= 1
        sequence = self._requests[index].sequence
        if sequence is None:
            return
        waiting = self._sequences[sequence]
        if waiting:
            self._freed.append(waiting.popleft())
        else:
            del self._sequences[sequence]

    def next_due_ns(self) -> int | None:
        """Return when the next request is due; None if nothing can be sent before another request has ended."""
        if self._running >= self._concurrency or self._next == len(self._requests):
            return None
        return self._requests[self._next].due_ns


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
                "do not come from the recorded load"
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


#: The client of each protocol, and its module. They are imported by their names: no package may import one above it.
_CLIENTS = {
    "http": ("protocols.clients.http_replay", "HttpReplayTarget"),
    "grpc": ("protocols.clients.grpc_client", "GrpcReplayTarget"),
}


#: To read more takes longer than a second or two, so that a line says it.
_LARGE_BYTE_SIZE = 100 << 20


def replay_recording(
    folder: Path, to: str, settings: ReplaySettings, *, models: Sequence[str], protocol: str, as_json: bool, shown: int
) -> int:
    """Send the requests of a recording and print what differs.

    Returns the exit code: 0 if nothing differs, 1 if something does, 2 if nothing could be found out, 130 if a person
    has stopped it before something differed.
    """
    byte_size = recording_byte_size(folder)
    if byte_size > _LARGE_BYTE_SIZE:
        typer.echo(f"reading {byte_size >> 20:,} MiB", err=True)
    try:
        url = base_url(to)
        index = RecordingIndex(folder, frozenset(models))
        if not index.exchanges:
            to_models = f" to {', '.join(models)}" if models else ""
            raise BadRecording(f"there is no request{to_models} in '{folder}'{_what_is_there(folder, models)}")
        report = ReplayReport(url)
        report.notes += (*index.problems, *index.cuts)
        if index.orphan_count:
            report.notes.append(
                f"{index.orphan_count} responses were left out: their requests were removed for newer ones"
            )
        if protocol == "auto":
            protocol = "grpc" if url.startswith("http://") and speaks_http2(url) else "http"
        module, name = _CLIENTS[protocol]
        client: Callable[[str], ReplayTarget] = getattr(importlib.import_module(module), name)
        with contextlib.suppress(KeyboardInterrupt):  # the report says so
            asyncio.run(_run(index, client, url, settings, report))
    except (ClientError, BadRecording, ReplayFailed) as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    if as_json:
        typer.echo(msgspec.json.encode(report.as_json()).decode())
    else:
        typer.echo(report.as_text(shown), nl=False)
    return report.exit_code


def _what_is_there(folder: Path, models: Sequence[str]) -> str:
    """Return the models that have requests in the recording, if others were asked for."""
    found = sorted({each.model for each in RecordingIndex(folder).exchanges}) if models else []
    return f": it has requests to {', '.join(found)}" if found else ""


async def _run(
    index: RecordingIndex,
    client: Callable[[str], ReplayTarget],
    url: str,
    settings: ReplaySettings,
    report: ReplayReport,
) -> None:
    target = client(url)
    try:
        await target.check()
        replay = Replay(index, target, settings, report)
        await replay.leave_out_missing()
        typer.echo(_introduction(index, replay, url), err=True)
        with progress_bar(replay.total, time_left=True) as progress:
            await replay.run(progress.done)
    finally:
        await target.close()


def _introduction(index: RecordingIndex, replay: Replay, url: str) -> str:
    """Return a line about what is going to be sent, and how long it will take at least."""
    first, last = (_local_time(index.exchanges[place].at_ns) for place in (0, -1))
    due_ns = replay.due_ns()
    takes = f", in {_duration(due_ns[-1] / 1e9)} or more (--speed 0: without pauses)" if due_ns and due_ns[-1] else ""
    return f"{replay.total} requests, recorded from {first} to {last}, go to {url}{takes}"


def _local_time(ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ns / 1e9))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
