"""Where records go, and which segments are removed."""

from __future__ import annotations

from kernel.recording.ring import (
    RingPosition,
    first_position,
    part_for,
    removed_for,
    segment_byte_size,
    segment_name,
    segment_number,
)

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
