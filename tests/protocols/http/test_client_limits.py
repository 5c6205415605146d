"""How long clients may keep a connection waiting, and what chunks may cost."""

from __future__ import annotations

from protocols.http.client_limits import TIMEOUTS, ChunkOverhead, ClientTimeouts, SlowClient, UnreadResponse

MAX_CHUNKS = 65536


def test_a_head_must_be_complete_in_time_however_many_parts_it_comes_in() -> None:
    client = SlowClient()
    client.received(100.0, idle=True)
    client.received(100.0 + TIMEOUTS.head_s - 1, idle=True)
    assert not client.is_too_slow(100.0 + TIMEOUTS.head_s - 0.5, idle=True, unsent=0)
    assert client.is_too_slow(100.0 + TIMEOUTS.head_s, idle=True, unsent=0)


def test_a_connection_without_a_begun_head_may_be_idle() -> None:
    client = SlowClient()
    assert not client.is_too_slow(1e6, idle=True, unsent=0)
    client.received(5.0, idle=True)
    client.received(6.0, idle=False)
    assert not client.is_too_slow(1e6, idle=True, unsent=0)


def test_a_request_that_runs_has_its_time() -> None:
    client = SlowClient()
    client.received(5.0, idle=True)
    assert not client.is_too_slow(1e6, idle=False, unsent=0)
    assert not client.is_too_slow(2e6, idle=True, unsent=0)


def test_a_client_that_reads_nothing_of_its_response_is_too_slow() -> None:
    client = SlowClient()
    assert not client.is_too_slow(10.0, idle=False, unsent=500)
    assert not client.is_too_slow(10.0 + TIMEOUTS.send_s - 1, idle=False, unsent=500)
    assert client.is_too_slow(10.0 + TIMEOUTS.send_s, idle=False, unsent=500)


def test_a_client_that_reads_slowly_is_not_too_slow() -> None:
    client = SlowClient()
    for step in range(100):
        assert not client.is_too_slow(step * (TIMEOUTS.send_s - 1), idle=False, unsent=1000 - step)
    assert not client.is_too_slow(1e5, idle=False, unsent=0)
    assert not client.is_too_slow(1e6, idle=False, unsent=700)


def test_a_response_is_unread_from_when_its_bytes_stop_becoming_fewer() -> None:
    unread = UnreadResponse()
    assert unread.waited_s(10.0, 0) == 0
    assert unread.waited_s(20.0, 500) == 0
    assert unread.waited_s(25.0, 500) == 5
    assert unread.waited_s(30.0, 400) == 0, "some were read"
    assert unread.waited_s(33.0, 900) == 3, "more were written, none was read"
    assert unread.waited_s(40.0, 0) == 0
    assert unread.waited_s(50.0, 100) == 0


def test_a_body_must_come_at_a_rate_after_its_first_seconds() -> None:
    timeouts = ClientTimeouts(body_s=30.0, bytes_per_s=1000)
    assert timeouts.body_end_s(100.0, 0) == 130.0
    assert timeouts.body_end_s(100.0, 5000) == 135.0


def test_small_chunks_with_short_extensions_are_no_excess() -> None:
    overhead = ChunkOverhead()
    assert not any(overhead.is_excessive(5 + 256 + 1, count, MAX_CHUNKS) for count in range(1, MAX_CHUNKS + 1))


def test_a_long_extension_is_an_excess() -> None:
    assert ChunkOverhead().is_excessive(64 << 10, 0, MAX_CHUNKS)
    assert ChunkOverhead().is_excessive((64 << 10) + 5, 5, MAX_CHUNKS)


def test_large_chunks_do_not_pay_for_endless_extensions() -> None:
    overhead = ChunkOverhead()
    assert not overhead.is_excessive(1 << 30, 1 << 30, MAX_CHUNKS)
    assert overhead.is_excessive(19 << 20, 1 << 30, MAX_CHUNKS)
