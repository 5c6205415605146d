"""Gives traces that have ended to a helper process, which writes them. The kernel neither formats nor waits.

What waits is limited in number and in bytes: traces that find the queue full are counted and lost. The helper does
nothing else, so that a slow disk or a collector that does not respond delays no request.
"""

from __future__ import annotations

import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from kernel.records.trace import USUAL_TAG
from kernel.records.trace_files import FileChoice, FileDestination, TraceFiles, WriteOutcome
from kernel.records.writing import ARRAY_32, GroupWriter, encode_into, is_behind, rest_s
from kernel.serving.helper_tasks import MessageTask

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from kernel.records.trace import TraceOutput, TraceRecord, UsualValues
    from kernel.records.trace_files import Destination, TraceFile
    from kernel.serving.helper_tasks import Helpers
    from kernel.settings import TraceValues

#: About the most bytes of traces that wait: traces with tensors may be large.
MAX_WAITING_BYTE_SIZE = 32 << 20

#: About the most bytes of traces that are written at a time.
BATCH_BYTE_SIZE = 1 << 20

#: For how many usual traces room is taken at a time. After as many, the bytes that wait are looked at.
_LENT_ROOM = 32

#: The most files that are remembered.
_MOST_DESTINATIONS = 512

#: The cause of losses that the helper or where it puts traces has.
_DESTINATION = "destination"


class _Group:
    """Traces that are written together. Setting an attribute takes less time than setting one of a `msgspec.Struct`."""

    __slots__ = ("borrower", "destination", "records", "room", "size")

    def __init__(self, destination: Destination, size: int) -> None:
        """There may be `size` traces."""
        self.destination = destination
        #: How many there may be, and how many more.
        self.size = self.room = size
        #: Who has a part of the room, and may put traces into `records` without a call.
        self.borrower: _FileOutput | None = None
        #: One `TraceRecord` or `UsualTrace` after the other in msgpack. They are encoded when they come, so that the
        #: memory of a trace is freed at once, and is still in the processor's cache when the next trace takes it.
        self.records = bytearray()

    @property
    def count(self) -> int:
        """How many traces there are."""
        return self.size - self.room - (0 if self.borrower is None else self.borrower.room)

    def arguments(self) -> bytes:
        """Return the arguments of the helper's function, by one copy of the records."""
        return b"".join((self.destination.arguments(), ARRAY_32.pack(0xDD, self.count), self.records))

    def lend(self, borrower: _FileOutput, most: int) -> int:
        """Give `borrower` room for at most `most` traces, and return for how many, until `take_back`."""
        self.take_back()
        room = min(self.room, most)
        self.room -= room
        self.borrower = borrower
        return room

    def take_back(self) -> None:
        """Have all of the room that is left."""
        borrower, self.borrower = self.borrower, None
        if borrower is not None:
            self.room += borrower.give_back()


class TraceWriter(GroupWriter):
    """The queue of traces before the helper. Use it only in the kernel's event loop."""

    def __init__(self, helpers: Helpers, stop: Callable[[], object]) -> None:
        """`stop` ends tracing until the settings are changed: nothing can be written."""
        super().__init__(helpers, stop, "trace was", "traces were")
        #: What waits, in groups that are given to the helper at a time; `last` is the one that gets more records.
        self.waiting: deque[_Group] = deque()
        self.last: _Group | None = None
        #: How many traces wait in groups before `last`, and their bytes. With a log frequency of 1 there are as many
        #: groups as traces.
        self._closed_count = self._closed_byte_size = 0
        self._files = TraceFiles()
        self._destinations: dict[TraceFile, FileDestination] = {}

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

    def put(self, destination: Destination, record: TraceRecord) -> None:
        """Write `record` soon. Never waits."""
        group = self.group_for(destination)
        if group is not None:
            encode_into(record, group.records, -1)
            group.room -= 1
            self._check_full(group)

    def group_for(self, destination: Destination) -> _Group | None:
        """Return the group of the next trace, which has room; None if too many wait: one is lost."""
        group = self.take_back()
        if group is not None and group.destination is destination:
            self._check_full(group)
            if group.room:
                return group
        return self._begin_group(destination)

    def take_back(self) -> _Group | None:
        """Let nobody have room of the last group, which is returned if there is one."""
        if self.last is not None:
            self.last.take_back()
        return self.last

    def _begin_group(self, destination: Destination) -> _Group | None:
        """Return a new group for the next traces, which is written soon; None if too many wait: one is lost."""
        room = min(destination.batch, destination.max_waiting - self.waiting_count)
        if room <= 0:
            self._lose(1, destination.full)
            return None
        if self.waiting_byte_size >= MAX_WAITING_BYTE_SIZE:
            self._lose(1, f"more than {MAX_WAITING_BYTE_SIZE >> 20} MiB of traces wait to be written")
            return None
        if self.last is not None:  # which nobody has room of
            self._closed_count += self.last.count
            self._closed_byte_size += len(self.last.records)
        group = self.last = _Group(destination, room)
        self.waiting.append(group)
        if self.turns.resting:
            self.turns.soon(destination.delay_s)
        return group

    def _check_full(self, group: _Group) -> None:
        """Let the helper have `group`, the last one, if it has as many traces or bytes as it may."""
        if not group.room or len(group.records) > BATCH_BYTE_SIZE:
            group.size, group.room = group.count, 0
            if is_behind(*self._backlog(group.destination)):
                self.turns.now()

    @property
    def waiting_count(self) -> int:
        """How many traces wait."""
        return self._closed_count + (0 if self.last is None else self.last.count)

    @property
    def waiting_byte_size(self) -> int:
        """How many bytes of traces wait."""
        return self._closed_byte_size + (0 if self.last is None else len(self.last.records))

    def _backlog(self, destination: Destination) -> tuple[float, float]:
        """Return what waits and what the next task takes, in parts of the largest task to `destination`."""
        if not self.waiting:
            return 0.0, 0.0
        head = self.waiting[0]
        bytes_part = len(head.records) / BATCH_BYTE_SIZE
        return (
            max(self.waiting_count / destination.batch, bytes_part),
            max(head.count / head.destination.batch, bytes_part),
        )

    def _next_task(self) -> MessageTask | None:
        """Return the task of the next traces; None if none wait."""
        if not self.waiting:
            return None
        group = self.waiting.popleft()
        group.take_back()
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
            self._logger.warning("tracing stops until its settings are changed: %s", outcome.problem)
            self._stop()
            self._lose(outcome.lost + self.drop_all(), outcome.problem, cause=_DESTINATION)
        elif outcome.lost:
            self._lose(outcome.lost, outcome.problem, cause=_DESTINATION)
        backlog = self._backlog(destination)
        self.turns.ended(rest_s(outcome.took_s, destination.rest_factor, destination.delay_s, *backlog))

    def drop_all(self) -> int:
        """Drop what waits; returns how many traces."""
        self.take_back()
        count, self.last = self.waiting_count, None
        self._closed_count = self._closed_byte_size = 0
        self.waiting.clear()
        return count


class CollectorOutput:
    """The output of samplers whose traces go to a collector."""

    def __init__(self, writer: TraceWriter, destination: Destination) -> None:
        self.put: Callable[[TraceRecord], None] = partial(writer.put, destination)  # takes no frame of its own

    def put_usual(self, values: UsualValues, now_ns: Callable[[], int]) -> None:
        """Refuse: a trace with ids for OpenTelemetry is not usual."""
        raise AssertionError("a usual trace for a collector")


class _FileOutput:
    """The output of one sampler whose traces are in files. A `TraceOutput`."""

    def __init__(self, writer: TraceWriter, choice: FileChoice) -> None:
        self._writer = writer
        self._choice = choice
        self._destination: FileDestination | None = None
        #: How many usual traces may be put into `_records` of the writer's last group without another look at it.
        self.room = 0
        self._records = bytearray()

    def put(self, record: TraceRecord) -> None:
        self._writer.take_back()
        destination = self._next_destination()
        if not record.parent_id:
            self._choice.room -= 1
        self._writer.put(destination, record)

    def put_usual(self, values: UsualValues, now_ns: Callable[[], int]) -> None:
        room = self.room or self._borrow_room()
        if room:
            self.room = room - 1
            encode_into((USUAL_TAG, now_ns(), values), self._records, -1)

    def _next_destination(self) -> FileDestination:
        """Return the destination of the next trace, which has room for it."""
        if not self._choice.room or self._destination is None:
            self._destination = self._writer.destination_of(self._choice.next_file())
        return self._destination

    def _borrow_room(self) -> int:
        """Return for how many usual traces there is room; 0 if too many wait: one is lost."""
        group = self._writer.group_for(self._next_destination())
        if group is None:
            return 0
        room = group.lend(self, min(_LENT_ROOM, self._choice.room))
        self._choice.room -= room
        self._records = group.records
        return room

    def give_back(self) -> int:
        """Have no room, and return for how many traces there was any."""
        room, self.room = self.room, 0
        self._choice.room += room
        return room
