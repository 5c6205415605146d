"""Frames survive any splitting of the stream."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.transport.framing import MAX_READ, MAX_WORKER_FRAME, BadFrame, FrameReader, frame


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 17)))
def test_messages_come_out_as_they_went_in_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(message) for message in messages)
    reader = FrameReader(MAX_WORKER_FRAME)
    found: list[bytes] = []
    position = 0
    for length in [*cuts, len(stream)]:
        found += reader.feed(stream[position : position + length])
        position += length
    assert found == messages


def test_a_frame_longer_than_any_of_ours_is_refused() -> None:
    with pytest.raises(BadFrame):
        FrameReader(1000).feed(struct.pack("<I", 1001))
    assert FrameReader(1000).feed(struct.pack("<I", 1000)) == []


def test_it_says_how_much_a_large_message_lacks_and_nothing_without_one() -> None:
    reader, message = FrameReader(MAX_WORKER_FRAME), bytes(2 * MAX_READ)
    stream = frame(message) + frame(b"next")
    assert (reader.feed(stream[:2]), reader.wanted) == ([], 0)
    assert (reader.feed(stream[2:100]), reader.wanted) == ([], MAX_READ)
    assert (reader.feed(stream[100 : MAX_READ + 100]), reader.wanted) == ([], MAX_READ + 4 - 100)
    assert reader.feed(stream[MAX_READ + 100 : -1]) == [message]
    assert reader.wanted == 1
    assert (reader.feed(stream[-1:]), reader.wanted) == ([b"next"], 0)
    assert (reader.feed(frame(b"x")), reader.wanted) == ([b"x"], 0)
