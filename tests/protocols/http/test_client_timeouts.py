"""How long clients may keep a connection waiting, and what chunks may cost."""

from __future__ import annotations

from protocols.http.client_timeouts import HEAD_S, SEND_S, ChunkOverhead, Patience

MAX_CHUNKS = 65536


def test_a_head_must_be_complete_in_time_however_many_parts_it_comes_in() -> None:
    patience = Patience()
    patience.received(100.0, idle=True)
    patience.received(100.0 + HEAD_S - 1, idle=True)
    assert not patience.is_over(100.0 + HEAD_S - 0.5, idle=True, unsent=0)
    assert patience.is_over(100.0 + HEAD_S, idle=True, unsent=0)


def test_a_connection_without_a_begun_head_may_be_idle() -> None:
    patience = Patience()
    assert not patience.is_over(1e6, idle=True, unsent=0)
    patience.received(5.0, idle=True)
    patience.received(6.0, idle=False)
    assert not patience.is_over(1e6, idle=True, unsent=0)


def test_a_request_that_runs_has_its_time() -> None:
    patience = Patience()
    patience.received(5.0, idle=True)
    assert not patience.is_over(1e6, idle=False, unsent=0)
    assert not patience.is_over(2e6, idle=True, unsent=0)


def test_a_client_that_reads_nothing_of_its_answer_is_given_up() -> None:
    patience = Patience()
    assert not patience.is_over(10.0, idle=False, unsent=500)
    assert not patience.is_over(10.0 + SEND_S - 1, idle=False, unsent=500)
    assert patience.is_over(10.0 + SEND_S, idle=False, unsent=500)


def test_a_client_that_reads_slowly_is_not() -> None:
    patience = Patience()
    for step in range(100):
        assert not patience.is_over(step * (SEND_S - 1), idle=False, unsent=1000 - step)
    assert not patience.is_over(1e5, idle=False, unsent=0)
    assert not patience.is_over(1e6, idle=False, unsent=700)


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
