"""The task of the helper that writes records into segments: what the kernel passes to it, and what it makes of that.

The kernel does as little as possible: a message is the tensors as they are, between a few values, and is encoded where
it arises. Digests, limits and the form of the files are the helper's work.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.records.recording_format import (
    MAX_CONTENT,
    RecordedOutput,
    RecordedTensor,
    RequestRecord,
    ResponseRecord,
    RingPosition,
    SegmentHeader,
    encode_record,
    frame,
    part_for,
    removed_for,
    segment_name,
    segment_number,
    segment_start,
)
from kernel.serving.helper_tasks import TaskResult
from kernel.version import __version__
from shm.tensor import ClientSpan  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernel.records.recording_format import Recorded
    from kernel.serving.helper_tasks import TaskSteps

#: The first values of messages.
REQUEST, RESPONSE = 0, 1

TOO_LARGE = "larger than the recorder's limit"


class PassedTensor(msgspec.Struct, array_like=True, gc=False):
    """A tensor. A `shm.tensor.Tensor` without a span is encoded alike."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes | None = None
    #: In place of `data`: which of the message's sources has the bytes, from 0 on.
    source: int | None = None
    #: In place of `data`: the region of the client that has the bytes.
    region: ClientSpan | None = None
    #: Only where the bytes are not passed: how many there are, and why.
    byte_size: int = 0
    missing: str = ""


class PassedOutput(msgspec.Struct, array_like=True, gc=False):
    """An output that a request asks for. A `shm.tensor.RequestedOutput` without a span is encoded alike."""

    name: str
    classification: int = 0
    span: None = None
    region: ClientSpan | None = None


class PassedRequest(msgspec.Struct, array_like=True, tag=REQUEST, gc=False):
    """A request. It has the fields of `RequestRecord`, in the order in which `Recorder` puts them."""

    number: int
    at_ns: int
    model: str
    version: int
    inputs: list[PassedTensor]
    wanted_version: str
    id: str
    outputs: list[PassedOutput]
    parameters: dict[str, str | int | bool | float]
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool
    in_sequence: bool
    priority: int
    timeout_us: int
    decoupled: bool
    protocol: str
    #: How many sources of the task stand before the sources of the message.
    first_source: int = 0


class PassedResponse(msgspec.Struct, array_like=True, tag=RESPONSE, gc=False):
    """A response. It has the fields of `ResponseRecord`, in the order in which `RecordedPassage` puts them."""

    number: int
    at_ns: int
    final: bool
    version: str
    outputs: list[PassedTensor] | None
    parameters: dict[str, str | int | bool | float] | None
    error: str
    code: str
    queued_ns: int
    first_source: int = 0


class TensorRules(msgspec.Struct, array_like=True, frozen=True):
    """How tensors are recorded; see `RecordSettings`."""

    limit: int
    input_digests: bool
    output_digests: bool


def record_of(passed: PassedRequest | PassedResponse, sources: Sequence[memoryview], rules: TensorRules) -> Recorded:
    """Return the record of a message; `sources` are the sources of the whole task."""
    if isinstance(passed, PassedResponse):
        outputs = None
        if passed.outputs is not None:
            digests = rules.output_digests
            outputs = [_recorded(output, passed, sources, rules.limit, digests, True) for output in passed.outputs]
        return ResponseRecord(
            passed.number, passed.at_ns, passed.final, passed.version, outputs, passed.parameters or {}, passed.error,
            passed.code, passed.queued_ns,
        )  # fmt: skip
    digests = rules.input_digests
    inputs = [_recorded(tensor, passed, sources, rules.limit, digests, digests) for tensor in passed.inputs]
    return RequestRecord(
        passed.number, passed.at_ns, passed.model, passed.version, inputs, passed.wanted_version, passed.id,
        [_requested(output) for output in passed.outputs], passed.parameters, passed.sequence_id, passed.sequence_start,
        passed.sequence_end, passed.in_sequence, passed.priority, passed.timeout_us, passed.decoupled, passed.protocol,
    )  # fmt: skip


def _recorded(
    tensor: PassedTensor,
    passed: PassedRequest | PassedResponse,
    sources: Sequence[memoryview],
    limit: int,
    digests: bool,
    large_by_digest: bool,
) -> RecordedTensor:
    """Return the record of a tensor. One of more than `limit` bytes has a digest or nothing in place of its bytes."""
    inline = tensor.data
    if inline and len(inline) <= limit and not digests:  # usual
        return RecordedTensor(tensor.name, tensor.datatype, tensor.shape, len(inline), inline)
    found = RecordedTensor(tensor.name, tensor.datatype, tensor.shape, tensor.byte_size, missing=tensor.missing)
    region = tensor.region
    if region is not None:
        found.byte_size, found.region, found.offset = region.byte_size, region.name, region.offset
        return found
    data = inline if tensor.source is None else sources[passed.first_source + tensor.source]
    if not data:
        return found
    found.byte_size = len(data)
    if digests or (large_by_digest and len(data) > limit):
        found.sha256 = hashlib.sha256(data).digest()
    elif len(data) > limit:
        found.missing = TOO_LARGE
    else:
        found.data = bytes(data)
    return found


def _requested(output: PassedOutput) -> RecordedOutput:
    found, region = RecordedOutput(output.name, output.classification), output.region
    if region is not None:
        found.region, found.offset, found.byte_size = region.name, region.offset, region.byte_size
    return found


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
