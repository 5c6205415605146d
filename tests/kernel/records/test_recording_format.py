"""Frames and records of a segment.

Where records go, and which segments are removed.
"""

from __future__ import annotations

import struct

import pytest

from kernel.records.recording_format import (
    BadRecording,
    RecordedOutput,
    RecordedTensor,
    RequestRecord,
    ResponseRecord,
    RingPosition,
    SegmentHeader,
    SegmentReader,
    decode_record,
    encode_record,
    first_position,
    frame,
    part_for,
    removed_for,
    segment_byte_size,
    segment_name,
    segment_number,
    segment_start,
)

START = segment_start(SegmentHeader("ab", "1.0", 10, 3))

CONTENTS = [b"first", b"", b"third" * 100]

WHOLE = START + b"".join(map(frame, CONTENTS))


def read(data: bytes) -> tuple[list[bytes], int]:
    reader = SegmentReader(memoryview(data), "s")
    return [bytes(content) for _, content in reader.contents()], reader.cut_byte_size


def test_what_was_written_is_read() -> None:
    assert read(WHOLE) == (CONTENTS, 0)
    assert SegmentReader(memoryview(WHOLE), "s").header == SegmentHeader("ab", "1.0", 10, 3)


def test_the_offset_of_a_content_is_where_it_stands() -> None:
    for offset, content in SegmentReader(memoryview(WHOLE), "s").contents():
        assert WHOLE[offset : offset + len(content)] == content


def test_a_segment_that_is_cut_anywhere_has_all_records_before_the_cut() -> None:
    ends = [len(START)]
    for content in CONTENTS:
        ends.append(ends[-1] + 8 + len(content))
    for length in range(len(START), len(WHOLE)):
        complete = sum(end <= length for end in ends[1:])
        assert read(WHOLE[:length]) == (CONTENTS[:complete], length - ends[complete])


def test_nothing_is_read_from_a_damaged_record_on() -> None:
    damaged = bytearray(WHOLE)
    damaged[len(START) + 9] ^= 1
    assert read(bytes(damaged)) == ([], len(WHOLE) - len(START))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "has no header"),
        (START[:-1], "has no header"),
        (b"X" * 40, "is not a recording"),
        (b"NAIADREC" + struct.pack("<I", 2) + START[12:], "has version 2 of the format; this program reads 1"),
        (START[:12] + frame(b"\x01"), "has a wrong header"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(BadRecording, match=why):
        SegmentReader(memoryview(data), "s")


def test_records_keep_all_their_fields() -> None:
    tensors = [
        RecordedTensor("a", "FP32", [1, 2], 8, data=b"12345678"),
        RecordedTensor("b", "BYTES", [1], 8, sha256=b"x" * 32),
        RecordedTensor("c", "FP32", [2], 8, region="r", offset=4),
        RecordedTensor("d", "FP32", [2], 8, missing="too large"),
    ]
    request = RequestRecord(
        7, 8, "m", 2, tensors, "2", "id", [RecordedOutput("o", 3, "r", 1, 2)], {"s": "t", "i": 1, "b": True, "f": 0.5},
        (1 << 64) - 1, True, True, True, 9, 10, True, "grpc",
    )  # fmt: skip
    response = ResponseRecord(7, 9, True, "2", tensors, {"p": 1}, "wrong", "internal", 8)
    for record in (request, response):
        assert decode_record(encode_record(record)) == record


def test_a_reader_skips_fields_that_it_does_not_know() -> None:
    import msgspec

    content = msgspec.msgpack.encode({"kind": "response", "number": 1, "at_ns": 2, "final": True, "later": [1]})
    assert decode_record(content) == ResponseRecord(1, 2, True)


LIMIT = 1600  # segments of 100 bytes


def test_a_server_begins_behind_the_segments_that_are_there() -> None:
    assert first_position([]) == RingPosition(1)
    assert first_position(["lock", "00000007.naiadrec", "00000003.naiadrec", "x.naiadrec"]) == RingPosition(8)


def test_only_files_with_names_of_segments_are_segments() -> None:
    assert segment_number(segment_name(12)) == 12
    assert segment_number(segment_name(10**9)) == 10**9
    assert [segment_number(name) for name in ("lock", "1.naiadrec", "00000001.naiadrec.gz")] == [None] * 3


def test_a_segment_takes_what_fits_and_at_least_one_record() -> None:
    assert segment_byte_size(LIMIT) == 100
    assert part_for(RingPosition(1, 50), [20, 30, 1], LIMIT) == 2
    assert part_for(RingPosition(1, 90), [20], LIMIT) == 0
    assert part_for(RingPosition(1), [500, 1], LIMIT) == 1


def test_segments_are_at_most_64_mebibytes() -> None:
    assert segment_byte_size(1 << 40) == 64 << 20


def test_the_oldest_segments_are_removed_and_never_the_one_that_is_written() -> None:
    segments = [(3, 500), (1, 600), (2, 400)]
    assert removed_for(segments, 100, LIMIT, 3) == []
    assert removed_for(segments, 101, LIMIT, 3) == [1]
    assert removed_for(segments, 800, LIMIT, 3) == [1, 2]
    assert removed_for(segments, 1000, LIMIT, 1) == [2, 3]


def test_what_does_not_fit_beside_the_present_segment_is_refused() -> None:
    assert removed_for([(1, 10), (2, 1000)], 700, LIMIT, 2) is None
