"""Passes records to a helper process, which writes them. The kernel does not write, and does not wait.

What waits is limited in number and bytes: records that find the queue full are counted and lost. The helper does
nothing else, so that a slow disk delays no request. A disk that is full ends the recording.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.records.record_task import WRITE_RECORDS, TensorRules, decode_result, encode_arguments
from kernel.records.writing import ARRAY_32, GroupWriter, encode_into
from kernel.serving.helper_tasks import MessageTask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.errors import ServingError
    from kernel.records.record_settings import RecordSettings
    from kernel.records.record_task import RecordResult
    from kernel.records.recording_format import RingPosition
    from kernel.serving.helper_tasks import Helpers
    from shm.tensor import Tensor

#: The most records that wait, and the most bytes of theirs, in messages and in memory that is shared with the helper.
#: They are looked at when a group is begun, so that there may be one group more.
MAX_WAITING = 32_768
MAX_WAITING_BYTE_SIZE = 64 << 20

#: How long records wait for others that are written with them, in seconds.
FLUSH_S = 0.1

#: The most records of a group, and about the most bytes, that the helper gets at a time.
BATCH_LENGTH = 512
BATCH_BYTE_SIZE = 1 << 20


class _RecordGroup(msgspec.Struct, eq=False):
    """Records that are written together."""

    #: The beginning of a list, and one message after the other, in msgpack. They are encoded when they come: the kernel
    #: keeps no object of them.
    messages: bytearray
    sources: list[Tensor]
    source_byte_size: int = 0
    count: int = 0

    @property
    def byte_size(self) -> int:
        return len(self.messages) + self.source_byte_size

    def release(self) -> None:
        """Release the sources."""
        for source in self.sources:
            source.release()


class RecordWriter(GroupWriter):
    """The queue of records before the helper, a `RecordOutput`. Use it only in the kernel's event loop."""

    def __init__(
        self,
        helpers: Helpers,
        folder: str,
        run: str,
        settings: RecordSettings,
        position: RingPosition,
        stop: Callable[[], object],
    ) -> None:
        """Write into segments of `folder` from `position` on. `stop` ends the recording."""
        super().__init__(helpers, stop, "record of the recorder was", "records of the recorder were")
        self._folder, self._run, self._limit = folder, run, settings.byte_size
        self._rules = TensorRules(settings.tensor_limit, settings.input_digests, settings.output_digests)
        self._position = position
        #: The group that gets more records, and those that have all of theirs.
        self._open: _RecordGroup | None = None
        self._full: deque[_RecordGroup] = deque()
        #: Records and bytes of the full groups, and bytes of what the helper has.
        self._count = 0
        self._byte_size = 0
        self._stopped = False

    def put(self, message: tuple[Any, ...], sources: Sequence[Tensor] = ()) -> bool:
        group = self._open
        if group is None:
            group = self._begin_group()
            if group is None:
                _release(sources)
                return False
        messages = group.messages
        start = len(messages)
        if sources:
            message = (*message, len(group.sources))
        try:
            encode_into(message, messages, -1)
        except (ValueError, OverflowError, TypeError) as error:
            del messages[start:]  # a part of a message would spoil all later ones
            _release(sources)
            self._lose(1, f"a text or number in them cannot be encoded: {error}", cause="encoding")
            return False
        group.count = count = group.count + 1
        if sources:
            group.sources += sources
            group.source_byte_size += sum(source.byte_size for source in sources)
        turns = self.turns
        if count >= BATCH_LENGTH or len(messages) + group.source_byte_size >= BATCH_BYTE_SIZE:
            self._close_group(group)
            turns.now()
        elif turns.resting:
            turns.soon(FLUSH_S)
        return True

    def _begin_group(self) -> _RecordGroup | None:
        """Return a new group; None if there is no room."""
        # A single record may be larger than the limit, so that it is not lost on each occasion.
        if self._stopped or self._count >= MAX_WAITING or self._byte_size > MAX_WAITING_BYTE_SIZE:
            self._lose(1, "the recording has stopped" if self._stopped else "too many records wait to be written")
            return None
        self._open = group = _RecordGroup(bytearray(ARRAY_32.size), [])
        return group

    def _close_group(self, group: _RecordGroup) -> None:
        self._open = None
        self._count += group.count
        self._byte_size += group.byte_size
        self._full.append(group)

    async def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s` seconds; what is left then is lost. Nothing is taken any more."""
        await super().close(timeout_s)
        self._stopped = True

    def _next_task(self) -> MessageTask | None:
        """Return the task of the next records; None if none wait."""
        if not self._full:
            if self._open is None or not self._open.count:
                return None
            self._close_group(self._open)
        group = self._full.popleft()
        self._count -= group.count
        ARRAY_32.pack_into(group.messages, 0, 0xDD, group.count)
        messages = msgspec.Raw(group.messages)
        arguments = (self._folder, self._run, self._limit, self._position, self._rules, messages)  # `RecordArguments`
        return MessageTask(
            WRITE_RECORDS, encode_arguments(arguments), group.sources, ended=lambda result: self._ended(group, result)
        )

    def _ended(self, group: _RecordGroup, result: bytes | ServingError) -> None:
        """The helper has written, or failed to write, the records of `group`."""
        self._byte_size -= group.byte_size
        if isinstance(result, bytes):
            self._written(group.count, decode_result(result))
        else:
            self._lose(group.count, result.message)
        self.turns.ended(0 if self._full else FLUSH_S)

    def _written(self, count: int, result: RecordResult) -> None:
        self._position = result.position
        self.written_count += count - result.lost
        if result.error:
            self._logger.warning(
                "recording stops until the server is started again: '%s' cannot be written: %s",
                self._folder, result.error,
            )  # fmt: skip
            self._stopped = True
            self._losses.count += result.lost + self.drop_all()  # the log has it
            self._stop()
        elif result.lost:
            self._lose(result.lost, "they are larger than half of the recording")

    def drop_all(self) -> int:
        """Drop what waits; returns how many records."""
        if self._open is not None:
            self._close_group(self._open)
        count, self._count = self._count, 0
        for group in self._full:
            self._byte_size -= group.byte_size
            group.release()
        self._full.clear()
        return count


def _release(sources: Sequence[Tensor]) -> None:
    for source in sources:
        source.release()
