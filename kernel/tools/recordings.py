"""Reads a recording: first where each request and its responses are, then those that are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.records.recording_format import (
    UNREADABLE,
    BadRecording,
    RequestRecord,
    ResponseRecord,
    SegmentReader,
    decode_record,
    segment_name,
    segment_number,
)

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path


class _RequestHead(msgspec.Struct, tag_field="kind", tag="request"):
    """What the index needs of a `RequestRecord`."""

    number: int
    at_ns: int
    model: str
    sequence_id: int | str = 0
    sequence_start: bool = False
    in_sequence: bool = False


class _ResponseHead(msgspec.Struct, tag_field="kind", tag="response"):
    """What the index needs of a `ResponseRecord`."""

    number: int
    final: bool


_decode_head = msgspec.msgpack.Decoder(_RequestHead | _ResponseHead).decode


#: Where a record is: the number of its segment, its offset and its size, in one number. A recording has millions.
RecordPlace = int

_OFFSET_BITS, _SIZE_BITS = 40, 32


class RecordedExchange(msgspec.Struct, eq=False, gc=False):
    """A request and its responses."""

    #: When the server had received it, in nanoseconds since 1970.
    at_ns: int
    model: str
    request: RecordPlace
    #: Model and id; None for a request without a sequence.
    sequence: tuple[str, int | str] | None
    sequence_start: bool
    responses: list[RecordPlace] = []
    #: Whether it has its final response.
    complete: bool = False


def recording_byte_size(folder: Path) -> int:
    """Return how many bytes the segments in a folder have; 0 if it cannot be read."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir() if segment_number(path.name) is not None)
    except OSError:
        return 0


class RecordingIndex:
    """The exchanges of a recording, in the order in which the server received their requests."""

    def __init__(self, folder: Path, models: Container[str] = ()) -> None:
        """With `models`, only the requests to these count. Raises `BadRecording`."""
        self._folder = folder
        self._models = models
        #: Responses whose requests are not in the recording any more.
        self.orphan_count = 0
        #: Why segments could not be read, and what is missing at the end of others.
        self.problems: list[str] = []
        self.cuts: list[str] = []
        self.exchanges: list[RecordedExchange] = []
        try:
            names = sorted((number, path.name) for path in folder.iterdir()
                           if (number := segment_number(path.name)) is not None)  # fmt: skip
        except OSError as error:
            raise BadRecording(f"'{folder}' cannot be read: {error.strerror}") from None
        if not names:
            raise BadRecording(f"there is no recording in '{folder}': no file is called NUMBER.naiadrec")
        self._open: dict[tuple[str, int], RecordedExchange | None] = {}
        #: One text for each name.
        self._names: dict[str, str] = {}
        for number, name in names:
            self._add_segment(number, name)
        self._open.clear()
        if len(self.problems) == len(names):
            raise BadRecording(self.problems[0])
        self.exchanges.sort(key=lambda each: each.at_ns)

    def _add_segment(self, number: int, name: str) -> None:
        title = f"'{self._folder / name}'"
        try:
            reader = SegmentReader(memoryview((self._folder / name).read_bytes()), title)
        except FileNotFoundError:  # removed for newer ones, meanwhile
            return
        except OSError as error:
            self.problems.append(f"{title} cannot be read: {error.strerror}")
            return
        except BadRecording as error:
            self.problems.append(str(error))
            return
        header = reader.header
        for offset, content in reader.contents():
            place = (((number << _OFFSET_BITS) | offset) << _SIZE_BITS) | len(content)
            try:
                head = _decode_head(content)
            except UNREADABLE as error:
                self.problems.append(f"{title} has a wrong record at {offset}: {error}")
                continue
            self._add(head, place, header.run, header.wall_ns - header.monotonic_ns)
        if reader.cut_byte_size:
            self.cuts.append(
                f"{title} has no complete record in its last {reader.cut_byte_size} bytes: the server was killed while "
                "it wrote them, or the file is damaged"
            )

    def _add(self, head: _RequestHead | _ResponseHead, place: RecordPlace, run: str, offset_ns: int) -> None:
        key = (run, head.number)
        if isinstance(head, _RequestHead):
            if self._models and head.model not in self._models:
                self._open[key] = None
                return
            model = self._names.setdefault(head.model, head.model)
            sequence = (model, head.sequence_id) if head.in_sequence else None
            found = RecordedExchange(head.at_ns + offset_ns, model, place, sequence, head.sequence_start)
            self._open[key] = found
            self.exchanges.append(found)
            return
        if key not in self._open:
            self.orphan_count += 1
            return
        exchange = self._open[key]
        if exchange is not None:
            exchange.responses.append(place)
            exchange.complete = exchange.complete or head.final
        if head.final:
            del self._open[key]

    def load(self, exchange: RecordedExchange) -> tuple[RequestRecord, list[ResponseRecord]]:
        """Return the records of an exchange. Raises `BadRecording` if they were removed meanwhile."""
        request, *responses = map(self._record, (exchange.request, *exchange.responses))
        if not isinstance(request, RequestRecord):
            raise BadRecording("its file has changed meanwhile")
        return request, [each for each in responses if isinstance(each, ResponseRecord)]

    def _record(self, place: RecordPlace) -> RequestRecord | ResponseRecord:
        byte_size = place & ((1 << _SIZE_BITS) - 1)
        offset = (place >> _SIZE_BITS) & ((1 << _OFFSET_BITS) - 1)
        path = self._folder / segment_name(place >> (_SIZE_BITS + _OFFSET_BITS))
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return decode_record(file.read(byte_size))
        except OSError as error:
            raise BadRecording(f"'{path}' cannot be read any more: {error.strerror}") from None
        except UNREADABLE as error:
            raise BadRecording(f"'{path}' has a wrong record at {offset}: {error}") from None
