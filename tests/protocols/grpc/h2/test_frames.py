"""Frames as RFC 9113 writes them, byte by byte."""

import pytest

from protocols.grpc.h2 import frames
from protocols.grpc.h2.frames import H2ErrorCode, Setting
from protocols.grpc.h2.sending import WriteQueue
from tests.protocols.grpc.h2.client_frames import sent_frames


@pytest.mark.parametrize(
    ("octets", "expected"),
    [
        (frames.frame_header(0x123456, frames.DATA, 1, 3), "123456 00 01 00000003"),
        (frames.settings([(Setting.MAX_FRAME_SIZE, 2**14)]), "000006 04 00 00000000 0005 00004000"),
        (frames.SETTINGS_ACK, "000000 04 01 00000000"),
        (frames.ping_ack(memoryview(b"12345678")), "000008 06 01 00000000 3132333435363738"),
        (frames.PING_REQUEST, "000008 06 00 00000000 0000000000000000"),
        (frames.rst_stream(5, H2ErrorCode.CANCEL), "000004 03 00 00000005 00000008"),
        (frames.window_update(7, 1000), "000004 08 00 00000007 000003e8"),
        (frames.goaway(9, H2ErrorCode.NO_ERROR, "max_age"), "00000f 07 00 00000000 00000009 00000000 6d61785f616765"),
    ],
)
def test_frames_are_written_as_the_rfc_says(octets: bytes, expected: str) -> None:
    assert octets == bytes.fromhex(expected)


def test_entries_of_settings_are_read() -> None:
    octets = frames.settings([(Setting.ENABLE_PUSH, 0), (Setting.INITIAL_WINDOW_SIZE, 7)])
    assert frames.settings_entries(memoryview(octets)[9:]) == [(2, 0), (4, 7)]


def test_the_number_at_the_start_of_a_payload_is_read() -> None:
    assert frames.uint32(memoryview(b"\x80\0\0\5more")) == 2**31 + 5


@pytest.mark.parametrize("byte_size", [0, 1, 99, 100, 101, 200, 201, 999])
@pytest.mark.parametrize("end_stream", [False, True])
def test_a_header_block_is_cut_into_frames_of_the_size_that_the_client_accepts(
    byte_size: int, end_stream: bool
) -> None:
    block = (bytes(range(256)) * 4)[:byte_size]
    queue = WriteQueue()
    queue.put(frames.headers(3, block, max_byte_size=100, end_stream=end_stream))
    found = sent_frames(queue)
    assert b"".join(payload for *_, payload in found) == block
    assert all(stream_id == 3 and len(payload) <= 100 for _, _, stream_id, payload in found)
    frame_types, flags = [frame_type for frame_type, *_ in found], [flags for _, flags, *_ in found]
    assert frame_types == [frames.HEADERS, *[frames.CONTINUATION] * (len(found) - 1)]
    assert [bool(each & frames.END_HEADERS) for each in flags] == [False] * (len(found) - 1) + [True]
    assert [bool(each & frames.END_STREAM) for each in flags] == [end_stream] + [False] * (len(found) - 1)
