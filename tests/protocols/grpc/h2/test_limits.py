"""How often a connection may do what costs the server work and the client almost nothing."""

from collections.abc import Callable

import pytest

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode, Setting
from protocols.grpc.h2.headers import encode_block
from protocols.grpc.h2.limits import FloodCounters, TokenBucket
from protocols.grpc.h2.testing import FIELDS, failure, feed, frame, open_connection, request_headers

SECOND = 10**9

BLOCK = encode_block(FIELDS)


def test_a_bucket_allows_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(burst=3, per_second=2)
    assert [bucket.take(0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(SECOND) for _ in range(2)] == [True, False]


def test_a_bucket_never_holds_more_than_its_burst() -> None:
    bucket = TokenBucket(burst=2, per_second=10)
    assert bucket.take(0)
    assert [bucket.take(100 * SECOND) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("count", "allowed"),
    [
        (FloodCounters.stream_reset, 1000),
        (FloodCounters.settings, 100),
        (lambda floods: floods.ping(has_calls=True, sent_byte_size=0), 100),
        (FloodCounters.useless_frame, 1000),
        (lambda floods: floods.data(0), limits.MAX_EMPTY_DATA_FRAMES),
    ],
)
def test_one_more_than_is_allowed_ends_the_connection(count: Callable[[FloodCounters], None], allowed: int) -> None:
    floods = FloodCounters()
    for _ in range(allowed):
        count(floods)
    with pytest.raises(ConnectionFailure) as caught:
        count(floods)
    assert caught.value.code is H2ErrorCode.ENHANCE_YOUR_CALM


def test_the_time_of_the_counters_is_the_one_that_was_set() -> None:
    floods = FloodCounters()
    for second in range(10):
        floods.now_ns = second * SECOND
        for _ in range(90):
            floods.ping(has_calls=False, sent_byte_size=0)


def test_data_with_content_forgives_empty_frames() -> None:
    floods = FloodCounters()
    for _ in range(10):
        for _ in range(limits.MAX_EMPTY_DATA_FRAMES):
            floods.data(0)
        floods.data(1)


# ---- floods of frames -----------------------------------------------------------------------


def rapid_resets(count: int) -> bytes:
    return b"".join(request_headers(2 * n + 1) + frames.rst_stream(2 * n + 1, H2ErrorCode.CANCEL) for n in range(count))


@pytest.mark.parametrize(
    ("flood", "allowed"),
    [
        (rapid_resets, 1000),
        (lambda count: b"".join(request_headers(2 * n + 1, [("a", "b")]) for n in range(count)), 1000),
        (lambda count: frames.settings([]) * count, 99),
        (lambda count: frame(frames.PING, 0, 0, bytes(8)) * count, 100),
        (lambda count: frame(frames.PRIORITY, 0, 1, bytes(5)) * count, 1000),
        (lambda count: frame(0x42, 0, 1, b"unknown") * count, 1000),
        (lambda count: request_headers(1) + frame(frames.DATA, 0, 1) * count, 100),
        (lambda count: frame(frames.HEADERS, 0, 1, BLOCK) + frame(frames.CONTINUATION, 0, 1) * count, 8),
    ],
)
def test_a_flood_ends_the_connection(flood: Callable[[int], bytes], allowed: int) -> None:
    connection = open_connection()
    feed(connection, flood(allowed))
    assert not connection.sending.ended
    connection = open_connection()
    feed(connection, flood(allowed + 1))
    assert failure(connection) is H2ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "octets",
    [
        frames.settings([(Setting.HEADER_TABLE_SIZE, 1)] * (limits.MAX_SETTINGS_ENTRIES + 1)),
        frames.frame_header(limits.MAX_HEADER_BLOCK_BYTE_SIZE * 2, frames.HEADERS, 4, 1),
        frame(frames.HEADERS, 0, 1, bytes(16_000)) + frame(frames.CONTINUATION, 0, 1, bytes(16_000)),
        # One entry of 4 KiB in the table, and many references to it.
        frame(frames.HEADERS, 4, 1, b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 1000),
    ],
)
def test_headers_and_settings_without_a_bound_end_the_connection(octets: bytes) -> None:
    connection = open_connection()
    feed(connection, octets)
    assert failure(connection) is H2ErrorCode.ENHANCE_YOUR_CALM


def test_pings_at_a_calm_pace_go_on_for_ever() -> None:
    connection = open_connection()
    for second in range(1000):
        feed(connection, frame(frames.PING, 0, 0, bytes(8)) * 50, second * SECOND)
    assert not connection.sending.ended
