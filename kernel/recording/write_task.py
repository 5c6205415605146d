"""The task of the helper that writes records into segments."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.recording.format import MAX_CONTENT, SegmentHeader, encode_record, frame, segment_start
from kernel.recording.passed import PassedRequest, PassedResponse, TensorRules, record_of
from kernel.recording.ring import RingPosition, part_for, removed_for, segment_name, segment_number
from kernel.serving.helper_tasks import TaskResult
from kernel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernel.serving.helper_tasks import TaskSteps

#: The name of the function.
WRITE_RECORDS = "records.write"


class RecordArguments(msgspec.Struct, array_like=True):
    """Write these records into the segments of a folder."""

    folder: str
    run: str
    #: The most bytes of all segments.
    limit: int
    position: RingPosition
    rules: TensorRules
    passed: list[PassedRequest | PassedResponse]


class RecordResult(msgspec.Struct, array_like=True):
    """Where the next records go; how many records were too large; or why nothing more can be written."""

    position: RingPosition
    lost: int = 0
    error: str = ""


encode_arguments = msgspec.msgpack.Encoder().encode
decode_result = msgspec.msgpack.Decoder(RecordResult).decode
_decode_arguments = msgspec.msgpack.Decoder(RecordArguments).decode


def write_records_task(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    """Write records."""
    yield from ()  # a task function is a generator, and this one needs no memory
    wanted = _decode_arguments(arguments)
    rules = wanted.rules
    frames = [frame(encode_record(record_of(passed, sources, rules))) for passed in wanted.passed]
    return TaskResult(msgspec.msgpack.encode(write_frames(wanted, frames)))


def write_frames(wanted: RecordArguments, frames: Sequence[bytes]) -> RecordResult:
    """Write frames behind the position, into as many segments as they need.

    An error leaves the segments as they were after the last part that was written.
    """
    fitting = [each for each in frames if len(each) <= min(wanted.limit // 2, MAX_CONTENT)]
    lost = len(frames) - len(fitting)
    position = wanted.position
    while fitting:
        count = part_for(position, [len(each) for each in fitting], wanted.limit)
        if not count:
            position = RingPosition(position.number + 1)
            continue
        try:
            position = _append(wanted, position, b"".join(fitting[:count]))
        except OSError as error:
            return RecordResult(position, lost + len(fitting), error.strerror or str(error))
        del fitting[:count]
    return RecordResult(position, lost)


def _append(wanted: RecordArguments, position: RingPosition, data: bytes) -> RingPosition:
    """Write `data` at `position`, and return the position behind it. Raises OSError; then nothing was written."""
    folder = Path(wanted.folder)
    path = folder / segment_name(position.number)
    kept = position.byte_size
    if kept and not path.exists():  # it was moved or removed: the recording continues in a new segment
        position, kept = RingPosition(position.number + 1), 0
        path = folder / segment_name(position.number)
    if not kept:
        now = SegmentHeader(wanted.run, __version__, time.time_ns(), time.monotonic_ns())
        data = segment_start(now) + data
    removed = removed_for(_segments(folder, position), len(data), wanted.limit, position.number)
    if removed is None:
        raise OSError(errno.EFBIG, "the segments take more than the limit")
    for number in removed:
        (folder / segment_name(number)).unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o600)
    try:
        os.ftruncate(file, kept)  # what an interrupted write may have left
        _write_all(file, data, kept)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, kept)
            if not kept:
                path.unlink()
        raise
    finally:
        os.close(file)
    return RingPosition(position.number, kept + len(data))


def _write_all(file: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file, rest, offset)
        offset += count
        rest = rest[count:]


def _segments(folder: Path, position: RingPosition) -> Iterator[tuple[int, int]]:
    """Yield numbers and sizes of the segments in a folder; of the one that is written, what is kept of it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            number = segment_number(entry.name)
            if number is not None and entry.is_file(follow_symlinks=False):
                size = position.byte_size if number == position.number else entry.stat(follow_symlinks=False).st_size
                yield number, size
