"""Gives traces that have ended to a helper process, which writes them. The kernel neither formats nor waits.

What waits is limited in number and in bytes: traces that find the queue full are counted and lost. The helper does
nothing else, so that a slow disk or a collector that does not respond delays no request.
"""

from __future__ import annotations

import enum
import logging
import os
import struct
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from kernel.serving.helper_tasks import MessageTask
from kernel.tracing.output.file_task import WRITE_TRACES, decode_write_result, encode_arguments
from kernel.tracing.output.files import FileChoice, TraceFiles
from kernel.writing.rest import is_behind, rest_s
from kernel.writing.write_turns import WriteTurns

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from kernel.serving.helper_tasks import Helpers
    from kernel.settings import TraceValues
    from kernel.tracing.output.files import TraceFile
    from kernel.tracing.trace import TraceOutput, TraceRecord, UsualValues

logger = logging.getLogger(__name__)

#: The most traces that wait, and about the most bytes of them: traces with tensors may be large.
MAX_WAITING = 16384
MAX_WAITING_BYTE_SIZE = 32 << 20

#: How long traces wait for others that are written with them, in seconds.
FLUSH_S = 0.25

#: The most traces, and about the most bytes of them, that are written at a time. Each time costs the kernel about as
#: much as tracing 100 requests, and the helper a copy of the file.
_BATCH = 8192
_BATCH_BYTE_SIZE = 1 << 20

#: The most files that are remembered.
_MOST_DESTINATIONS = 512

#: The rest after a file was written, unless the helper is behind: the file is copied to add traces to it.
_REST_FACTOR = 10

#: The largest file.
MAX_FILE_BYTE_SIZE = 256 << 20

#: How often losses for one cause are logged, in seconds.
_LOSS_REPORT_S = 60.0


class WriteOutcome(msgspec.Struct, frozen=True):
    """What has become of traces that a helper got."""

    lost: int = 0
    #: Why traces were lost, or why no more can be written.
    problem: str = ""
    #: Whether nothing can be written before the settings change.
    stops: bool = False
    #: How long the helper has worked, in seconds; without its start and what it had to do before.
    took_s: float = 0.0


class Destination(Protocol):
    """Where a helper puts traces."""

    #: The name of the helper's function.
    task: str
    #: How long traces wait for others, in seconds; how many are given to the helper at a time, and may wait.
    delay_s: float
    batch: int
    max_waiting: int
    #: The helper rests this many times as long as it has worked, unless it is behind: see `kernel.writing.rest`.
    rest_factor: int

    def arguments(self) -> bytes:
        """Return the arguments of the helper's function in msgpack, but the last one: a list of traces."""

    def done(self, result: bytes) -> WriteOutcome:
        """Take the result of the helper's function."""


class FileDestination:
    """A file."""

    task = WRITE_TRACES
    delay_s = FLUSH_S
    batch = _BATCH
    max_waiting = MAX_WAITING
    rest_factor = _REST_FACTOR

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def arguments(self) -> bytes:
        """See `Destination`."""
        return encode_arguments((self._file.path, self._file.kept, None))[:-1]  # `WriteArguments`; None is one byte

    def done(self, result: bytes) -> WriteOutcome:
        """See `Destination`."""
        written = decode_write_result(result)
        if written.error:
            problem = f"the trace file '{self._file.path}' cannot be written: {written.error}"
            return WriteOutcome(written.lost, problem, stops=True, took_s=written.took_s)
        self._file.kept = written.kept
        if written.kept.byte_size <= MAX_FILE_BYTE_SIZE:
            return WriteOutcome(took_s=written.took_s)
        return WriteOutcome(
            problem=f"the trace file '{self._file.path}' has {written.kept.byte_size >> 20} MiB; to have several "
            "files, set a log frequency (--trace-config triton,log-frequency=N)",
            stops=True,
            took_s=written.took_s,
        )


_encode_into = msgspec.msgpack.Encoder().encode_into
#: The beginning of a list in msgpack.
_ARRAY_32 = struct.Struct(">BL")


class _Group:
    """Traces that are written together. Setting an attribute takes less time than that of a `msgspec.Struct`."""

    __slots__ = ("destination", "records", "room", "size")

    def __init__(self, destination: Destination, size: int) -> None:
        """There may be `size` traces."""
        self.destination = destination
        #: How many there may be, and how many more.
        self.size = self.room = size
        #: One `TraceRecord` or `UsualTrace` after the other in msgpack. They are encoded when they come, so that the
        #: memory of a trace is freed at once, and is still in the processor's cache when the next trace takes it.
        self.records = bytearray()

    @property
    def count(self) -> int:
        """How many traces there are."""
        return self.size - self.room

    def arguments(self) -> bytes:
        """Return the arguments of the helper's function, by one copy of the records."""
        return b"".join((self.destination.arguments(), _ARRAY_32.pack(0xDD, self.count), self.records))


class TraceWriter:
    """The queue of traces before the helper. Use it only in the kernel's event loop."""

    def __init__(self, helpers: Helpers, stop: Callable[[], object]) -> None:
        """`stop` ends tracing until the settings are changed: nothing can be written."""
        self._turns = WriteTurns(helpers, self._next_task)
        self._stop = stop
        #: What waits, in groups that are given to the helper at a time; `last` is the one that gets more records.
        self._waiting: deque[_Group] = deque()
        self.last: _Group | None = None
        #: How many traces wait in groups before `last`, and their bytes. With a log frequency of 1 there are as many
        #: groups as traces.
        self._closed_count = self._closed_byte_size = 0
        self._files = TraceFiles()
        self._destinations: dict[TraceFile, FileDestination] = {}
        self._losses = {cause: _Loss() for cause in _Cause}
        #: Traces that were written or exported, and those that were lost.
        self.written_count = self.lost_count = 0

    def file_output(self, values: TraceValues) -> TraceOutput:
        """Return the output for traces with these settings in mode `triton`."""
        return _FileOutput(self, FileChoice(values, os.path.abspath(values.trace_file), self._files))

    def destination_of(self, file: TraceFile) -> FileDestination:
        """Return the one destination for `file`."""
        found = self._destinations.get(file)
        if found is None:
            if len(self._destinations) > _MOST_DESTINATIONS:  # of files that are complete, except for a few
                self._destinations.clear()
            found = self._destinations[file] = FileDestination(file)
        return found

    def put(self, destination: Destination, record: TraceRecord | UsualValues) -> None:
        """Write `record` soon. Never waits."""
        group = self.last
        if group is None or not group.room or group.destination is not destination:
            group = self.begin_group(destination)
            if group is None:
                return
        _encode_into(record, group.records, -1)
        group.room -= 1
        if not group.room or len(group.records) > _BATCH_BYTE_SIZE:
            self.filled(group)

    def begin_group(self, destination: Destination) -> _Group | None:
        """Return a new group for the next traces, which is written soon; None if too many wait: one is lost."""
        room = min(destination.batch, destination.max_waiting - self._waiting_count())
        if room <= 0:
            self._lose(1, _Cause.NUMBER, "too many traces wait to be written")
            return None
        if self._waiting_byte_size() >= MAX_WAITING_BYTE_SIZE:
            self._lose(1, _Cause.BYTES, f"more than {MAX_WAITING_BYTE_SIZE >> 20} MiB of traces wait to be written")
            return None
        if self.last is not None:
            self._closed_count += self.last.count
            self._closed_byte_size += len(self.last.records)
        group = self.last = _Group(destination, room)
        self._waiting.append(group)
        if self._turns.resting:
            self._turns.soon(destination.delay_s)
        return group

    def filled(self, group: _Group) -> None:
        """Let the helper have `group`, the last one, which has as many traces as it may."""
        group.size, group.room = group.count, 0
        if is_behind(*self._backlog(group.destination)):
            self._turns.now()

    def _waiting_count(self) -> int:
        """Return how many traces wait."""
        return self._closed_count + (0 if self.last is None else self.last.count)

    def _waiting_byte_size(self) -> int:
        """Return how many bytes of traces wait."""
        return self._closed_byte_size + (0 if self.last is None else len(self.last.records))

    def _backlog(self, destination: Destination) -> tuple[float, float]:
        """Return what waits and what the next task takes, in parts of the largest task to `destination`."""
        if not self._waiting:
            return 0.0, 0.0
        head = self._waiting[0]
        bytes_part = len(head.records) / _BATCH_BYTE_SIZE
        return (
            max(self._waiting_count() / destination.batch, bytes_part),
            max(head.count / head.destination.batch, bytes_part),
        )

    async def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s` seconds; what is left then is lost."""
        if not await self._turns.close(timeout_s):
            self._lose(self._drop_all(), _Cause.END, "the server ends before they are written")
        for loss in self._losses.values():
            loss.report()

    def _next_task(self) -> MessageTask | None:
        """Return the task of the next traces; None if none wait."""
        if not self._waiting:
            return None
        group = self._waiting.popleft()
        if group is self.last:
            self.last = None
        else:
            self._closed_count -= group.count
            self._closed_byte_size -= len(group.records)
        destination = group.destination
        return MessageTask(
            destination.task,
            group.arguments(),
            ended=lambda result: self._ended(destination, group.count, result),
        )

    def _ended(self, destination: Destination, count: int, result: bytes | ServingError) -> None:
        """The helper has written, or failed to write, `count` traces."""
        outcome = destination.done(result) if isinstance(result, bytes) else WriteOutcome(count, result.message)
        self.written_count += count - outcome.lost
        if outcome.stops:
            logger.warning("tracing stops until its settings are changed: %s", outcome.problem)
            self._stop()
            self._lose(outcome.lost + self._drop_all(), _Cause.DESTINATION, outcome.problem)
        elif outcome.lost:
            self._lose(outcome.lost, _Cause.DESTINATION, outcome.problem)
        backlog = self._backlog(destination)
        self._turns.ended(rest_s(outcome.took_s, destination.rest_factor, destination.delay_s, *backlog))

    def _drop_all(self) -> int:
        """Drop what waits; returns how many traces."""
        count, self.last = self._waiting_count(), None
        self._closed_count = self._closed_byte_size = 0
        self._waiting.clear()
        return count

    def _lose(self, count: int, cause: _Cause, why: str) -> None:
        """Count lost traces, and log them: the first ones of each cause at once, then now and then."""
        if not count:
            return
        self.lost_count += count
        loss = self._losses[cause]
        loss.unreported += count
        loss.why = why
        now_s = time.monotonic()
        if now_s - loss.reported_s >= _LOSS_REPORT_S:
            loss.reported_s = now_s
            loss.report()


class _Cause(enum.Enum):
    """Why traces are lost. Each cause is logged by itself: a collector that is down also fills the queue."""

    NUMBER = enum.auto()
    BYTES = enum.auto()
    DESTINATION = enum.auto()
    END = enum.auto()


class _Loss:
    """The traces that were lost for one cause."""

    def __init__(self) -> None:
        self.reported_s = -_LOSS_REPORT_S
        #: How many the log does not have yet, and why the last of them was lost.
        self.unreported = 0
        self.why = ""

    def report(self) -> None:
        """Log what the log does not have yet."""
        count, self.unreported = self.unreported, 0
        if count:
            logger.warning("%d %s lost: %s", count, "trace was" if count == 1 else "traces were", self.why)


class WriterOutput(NamedTuple):
    """The output of samplers whose traces go to a collector."""

    #: As in `TraceOutput`; takes no frame of its own.
    put: Callable[[TraceRecord | UsualValues], None]


class _FileOutput:
    """The output of one sampler whose traces are in files."""

    def __init__(self, writer: TraceWriter, choice: FileChoice) -> None:
        self._writer = writer
        self._choice = choice
        self._destination: FileDestination | None = None

    def put(self, record: TraceRecord | UsualValues) -> None:
        """See `TraceOutput`."""
        choice, writer, destination = self._choice, self._writer, self._destination
        if not choice.room or destination is None:
            destination = self._destination = writer.destination_of(choice.next_file())
        if type(record) is tuple or not record.parent_id:  # type: ignore[union-attr]  # only the first is a tuple
            choice.room -= 1
        # From here on as `TraceWriter.put`, without its call.
        group = writer.last
        if group is None or not group.room or group.destination is not destination:
            group = writer.begin_group(destination)
            if group is None:
                return
        records = group.records
        _encode_into(record, records, -1)
        group.room = room = group.room - 1
        if not room or len(records) > _BATCH_BYTE_SIZE:
            writer.filled(group)
