"""The format of recordings: records, and how they stand in segments. Pure. docs/recorder.md describes it.

A file (a *segment*) begins with `MAGIC` and the version of the format. Then come frames: the length of the content, its
CRC-32, both little-endian, and the content, which is MessagePack. The first content is a `SegmentHeader`, each other
one a record. If the writer is killed, the last frame may be incomplete or have a wrong CRC; the records before it are
valid. The oldest segments are removed when the next records need their place.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAGIC = b"NAIADREC"

#: Is increased when old readers cannot read new files. New fields do not change it, because readers skip unknown
#: fields.
FORMAT_VERSION = 1

_PREFIX = struct.Struct("<8sI")

_FRAME = struct.Struct("<II")

#: The most bytes of a content: a longer one is damage.
MAX_CONTENT = 1 << 30


#: What reading a content raises that is damaged, or forged.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class BadRecording(ValueError):
    """A file is not a recording, or one that this version cannot read. The message is one line."""


class SegmentHeader(msgspec.Struct):
    """The first content of a segment."""

    #: Tells the servers apart that have written into one folder: 16 hexadecimal digits.
    run: str
    #: The version of the server.
    server: str
    #: The same moment in nanoseconds: since 1970, and on the clock of the records.
    wall_ns: int
    monotonic_ns: int


class RecordedTensor(msgspec.Struct, omit_defaults=True, gc=False):
    """A tensor. At most one of `data`, `sha256`, `region` and `missing` is set, and none for an empty tensor."""

    name: str
    datatype: str
    shape: list[int]
    byte_size: int = 0
    #: The bytes in the form of the protocols.
    data: bytes | None = None
    #: The digest of the bytes.
    sha256: bytes | None = None
    #: The region of the client that has the bytes, and where; the server does not read it.
    region: str = ""
    offset: int = 0
    #: Why the bytes are not recorded.
    missing: str = ""


class RecordedOutput(msgspec.Struct, omit_defaults=True, gc=False):
    """An output that the request asks for by its name."""

    name: str
    #: How many best classes are wanted; 0 for the tensor.
    classification: int = 0
    #: The client's region for the tensor, and where in it.
    region: str = ""
    offset: int = 0
    byte_size: int = 0


class RequestRecord(msgspec.Struct, omit_defaults=True, tag_field="kind", tag="request"):
    """A request of a client."""

    #: Unique among the requests of a run.
    number: int
    #: When the server had received it, in monotonic nanoseconds.
    at_ns: int
    model: str
    #: The version that got the request.
    version: int
    inputs: list[RecordedTensor]
    #: The version that the client asked for; empty for any.
    wanted_version: str = ""
    id: str = ""
    #: Empty for all outputs.
    outputs: list[RecordedOutput] = []
    parameters: dict[str, str | int | bool | float] = {}
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    #: Whether the model has sequences, so that the order of requests matters.
    in_sequence: bool = False
    priority: int = 0
    timeout_us: int = 0
    #: Whether the model may send any number of responses.
    decoupled: bool = False
    #: http or grpc; empty if the request did not come over one of them.
    protocol: str = ""


class ResponseRecord(msgspec.Struct, omit_defaults=True, tag_field="kind", tag="response"):
    """A response. One without outputs and without an error only marks the end of the responses."""

    #: That of the request.
    number: int
    at_ns: int
    final: bool
    version: str = ""
    outputs: list[RecordedTensor] | None = None
    parameters: dict[str, str | int | bool | float] = {}
    error: str = ""
    #: The code of the error, such as `invalid_arg`.
    code: str = ""
    #: Only in a final response: when the request was queued, in monotonic nanoseconds; 0 if it never was.
    queued_ns: int = 0


Recorded = RequestRecord | ResponseRecord


#: Returns the content of a record. Raises ValueError for texts that are not Unicode.
encode_record = msgspec.msgpack.Encoder().encode

_decode = msgspec.msgpack.Decoder[Recorded](Recorded).decode

_decode_header = msgspec.msgpack.Decoder(SegmentHeader).decode


def decode_record(content: bytes | memoryview) -> Recorded:
    """Return the record with this content. Raises one of `UNREADABLE`."""
    found: Recorded = _decode(content)
    return found


def segment_start(header: SegmentHeader) -> bytes:
    """Return the beginning of a segment."""
    return _PREFIX.pack(MAGIC, FORMAT_VERSION) + frame(encode_record(header))


def frame(content: bytes) -> bytes:
    """Return the frame of a content."""
    return _FRAME.pack(len(content), zlib.crc32(content)) + content


class SegmentReader:
    """Reads the bytes of a segment."""

    def __init__(self, data: memoryview, title: str) -> None:
        """`title` is the segment's name in errors. Raises `BadRecording`."""
        self._data = data
        if len(data) < _PREFIX.size:
            raise BadRecording(f"{title} has no header: it is empty, or cut")
        magic, version = _PREFIX.unpack_from(data)
        if magic != MAGIC:
            raise BadRecording(f"{title} is not a recording: it does not begin with {MAGIC.decode()}")
        if version != FORMAT_VERSION:
            raise BadRecording(f"{title} has version {version} of the format; this program reads {FORMAT_VERSION}")
        found = self._content_at(_PREFIX.size)
        if found is None:
            raise BadRecording(f"{title} has no header: it is cut, or damaged")
        try:
            self.header = _decode_header(found)
        except UNREADABLE as error:
            raise BadRecording(f"{title} has a wrong header: {error}") from None
        self._position = _PREFIX.size + _FRAME.size + len(found)
        #: How many bytes at the end are no complete record; known when `contents` has ended.
        self.cut_byte_size = 0

    def contents(self) -> Iterator[tuple[int, memoryview]]:
        """Yield each content with its offset in the segment, until one is not complete."""
        while (content := self._content_at(self._position)) is not None:
            start = self._position + _FRAME.size
            yield start, content
            self._position = start + len(content)
        self.cut_byte_size = len(self._data) - self._position

    def _content_at(self, position: int) -> memoryview | None:
        data, start = self._data, position + _FRAME.size
        if start > len(data):
            return None
        byte_size, crc = _FRAME.unpack_from(data, position)
        if byte_size > MAX_CONTENT or start + byte_size > len(data):
            return None
        content = data[start : start + byte_size]
        return content if zlib.crc32(content) == crc else None


#: A recording is removed by this part at a time, so that it has nearly the bytes that it may have.
_PARTS = 16

_MOST_SEGMENT_BYTE_SIZE = 64 << 20

_NAME = re.compile(r"([0-9]{8,})\.naiadrec")


class RingPosition(msgspec.Struct, array_like=True, frozen=True):
    """The segment that is written, and how many of its bytes are good. `byte_size` is 0 before its first record."""

    number: int
    byte_size: int = 0


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"{number:08}.naiadrec"


def segment_number(name: str) -> int | None:
    """Return the number of the segment with this file name; None for other files."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def first_position(names: Iterable[str]) -> RingPosition:
    """Return where a server begins in a folder with these files: behind all segments that are there."""
    return RingPosition(max(filter(None, map(segment_number, names)), default=0) + 1)


def segment_byte_size(limit: int) -> int:
    """Return the most bytes of a segment, in a recording of at most `limit` bytes. A single record may be larger."""
    return min(_MOST_SEGMENT_BYTE_SIZE, limit // _PARTS)


def part_for(position: RingPosition, sizes: Sequence[int], limit: int) -> int:
    """Return how many frames of these sizes go to the segment at `position`; the rest goes to later ones."""
    room = segment_byte_size(limit) - position.byte_size
    for count, size in enumerate(sizes):
        room -= size
        if room < 0 and (count or position.byte_size):
            return count
    return len(sizes)


def removed_for(segments: Iterable[tuple[int, int]], byte_size: int, limit: int, current: int) -> list[int] | None:
    """Return the numbers of the oldest segments that are removed before `byte_size` bytes are added to `current`.

    `segments` are numbers and sizes. None if the bytes do not fit although all others were removed.
    """
    found = sorted(segments)
    total = byte_size + sum(size for _, size in found)
    removed = []
    for number, size in found:
        if total <= limit:
            break
        if number != current:
            removed.append(number)
            total -= size
    return removed if total <= limit else None
