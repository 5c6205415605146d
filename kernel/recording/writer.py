"""Passes records to a helper process, which writes them. The kernel does not write, and does not wait.

What waits is limited in number and bytes: records that find the queue full are counted and lost. The helper does
nothing else, so that a slow disk delays no request. A disk that is full ends the recording.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InternalError
from kernel.recording.format import encode_record, tensors_of
from kernel.recording.write_task import (
    WRITE_RECORDS,
    RecordArguments,
    RecordEntry,
    RecordResult,
    decode_result,
    encode_arguments,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from kernel.recording.format import Recorded
    from kernel.recording.ring import RingPosition
    from kernel.serving.helper_tasks import Helpers
    from shm.tensor import Span, Tensor

logger = logging.getLogger(__name__)

#: The most records that wait, and the most bytes of theirs, in messages and in memory that is shared with the helper.
MAX_WAITING = 8192
MAX_WAITING_BYTE_SIZE = 64 << 20

#: How long records wait for others that are written with them, in seconds.
FLUSH_S = 0.1

#: The most records, and bytes of their messages, that are written at a time. To encode them takes about 1 ms.
_BATCH = 512
_BATCH_BYTE_SIZE = 1 << 20


class _WaitingRecord(msgspec.Struct, eq=False):
    content: bytes
    sources: list[Tensor]
    #: Of the message and of the sources.
    byte_size: int
    #: Whether the helper completes the record: it has sources or digests.
    completed: bool


class RecordWriter:
    """The queue of records before the helper. Use it only in the kernel's event loop."""

    def __init__(
        self, helpers: Helpers, folder: str, run: str, limit: int, position: RingPosition, stop: Callable[[], object]
    ) -> None:
        """Write into segments of `folder`, of at most `limit` bytes, from `position` on. `stop` ends the recording."""
        self._helpers = helpers
        self._folder, self._run, self._limit = folder, run, limit
        self._position = position
        self._stop = stop
        self._waiting: deque[_WaitingRecord] = deque()
        #: Of what waits and of what the helper has.
        self._byte_size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running = False
        self._stopped = False
        self._idle: asyncio.Event | None = None
        self._loss_logged = False
        #: Records that were written, and those that were lost.
        self.written_count = self.lost_count = 0

    def put(self, record: Recorded, sources: list[Tensor]) -> bool:
        """See `kernel.recording.recorder.RecordOutput`."""
        completed = bool(sources) or any(tensor.digest for tensor in tensors_of(record))
        try:
            content = encode_record(record)
        except (ValueError, OverflowError) as error:
            _release(sources)
            self._lose(1, f"a text or number in them cannot be encoded: {error}")
            return False
        byte_size = len(content) + sum(source.byte_size for source in sources)
        # A single record may be larger than the limit, so that it is not lost on each occasion.
        if self._stopped or len(self._waiting) >= MAX_WAITING or self._byte_size > MAX_WAITING_BYTE_SIZE:
            _release(sources)
            self._lose(1, "the recording has stopped" if self._stopped else "too many records wait to be written")
            return False
        self._byte_size += byte_size
        self._waiting.append(_WaitingRecord(content, sources, byte_size, completed))
        if not self._running:
            if len(self._waiting) >= _BATCH or self._byte_size >= _BATCH_BYTE_SIZE:
                self._start()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._start)
        return True

    async def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s` seconds; what is left then is lost. Nothing is taken any more."""
        if self._waiting or self._running:
            self._idle = asyncio.Event()
            self._start()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
            except TimeoutError:
                self._lose(self._drop_all(), "the server ends before they are written")
        self._stopped = True
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        """Give the next records to the helper."""
        self._cancel_timer()
        if self._running or not self._waiting:
            return
        waiting = self._waiting
        entries: list[RecordEntry] = []
        sources: list[Tensor] = []
        message_size = taken_size = 0
        while waiting and len(entries) < _BATCH and message_size < _BATCH_BYTE_SIZE:
            each = waiting.popleft()
            entries.append(RecordEntry(each.content, len(sources) if each.completed else -1))
            sources += each.sources
            message_size += len(each.content)
            taken_size += each.byte_size
        arguments = RecordArguments(self._folder, self._run, self._limit, self._position, entries)
        self._running = True
        self._helpers.start(_RecordTask(self, encode_arguments(arguments), sources, len(entries), taken_size))

    def ended(self, count: int, byte_size: int, result: bytes | ServingError) -> None:
        """The helper has written, or failed to write, `count` records, which took `byte_size` bytes."""
        self._running = False
        self._byte_size -= byte_size
        if isinstance(result, bytes):
            self._written(count, decode_result(result))
        else:
            self._lose(count, result.message)
        if self._waiting:
            self._start()
        elif self._idle is not None:
            self._idle.set()

    def _written(self, count: int, result: RecordResult) -> None:
        self._position = result.position
        self.written_count += count - result.lost
        if result.error:
            logger.warning(
                "recording stops until the server is started again: '%s' cannot be written: %s",
                self._folder, result.error,
            )  # fmt: skip
            self._stopped = True
            self.lost_count += result.lost + self._drop_all()
            self._stop()
        elif result.lost:
            self._lose(result.lost, "they are larger than half of the recording")

    def _drop_all(self) -> int:
        """Drop what waits; returns how many records."""
        count = len(self._waiting)
        for each in self._waiting:
            self._byte_size -= each.byte_size
            _release(each.sources)
        self._waiting.clear()
        return count

    def _lose(self, count: int, why: str) -> None:
        """Count lost records, and log the first."""
        self.lost_count += count
        if count and not self._loss_logged:
            self._loss_logged = True
            logger.warning(
                "%d records of the recorder were lost: %s. Later losses are only counted, in "
                "naiad_records_lost_total on the metrics page",
                count, why,
            )  # fmt: skip


def _release(sources: list[Tensor]) -> None:
    for source in sources:
        source.release()


class _RecordTask:
    """What the helper does. A `kernel.serving.helper_tasks.HelperTask`."""

    name = WRITE_RECORDS
    peer = ""

    def __init__(self, writer: RecordWriter, arguments: bytes, sources: list[Tensor], count: int, size: int) -> None:
        self.arguments = arguments
        self.sources = sources
        self._writer = writer
        self._count = count
        self._byte_size = size

    def needs_memory(self, message: bytes) -> Span:
        """Refuse: the result is small."""
        raise InternalError("writing records needs no memory of the server")

    def done(self, result: bytes, output: Tensor | None) -> None:
        """See `HelperTask`."""
        _release(self.sources)
        self._writer.ended(self._count, self._byte_size, result)

    def failed(self, error: ServingError) -> None:
        """See `HelperTask`."""
        _release(self.sources)
        self._writer.ended(self._count, self._byte_size, error)
