"""A cache over a store elsewhere: a store that fails, hangs or lies costs a miss, and is left alone for a time.

The circuit breaker: when a store that fails is asked again.

A signed value is one that a server with the same key has stored under the same key of the store.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from kernel.cache.encoding import MAX_STRINGS, STRINGS_AT_ONCE, BadEntry
from kernel.cache.stored import (
    FAILURE_LIMIT,
    FIRST_PAUSE_NS,
    LONGEST_PAUSE_NS,
    MAX_INSERTED_BYTE_SIZE,
    MAX_INSERTIONS,
    MAX_LOOKUPS,
    CircuitBreaker,
    Signing,
    StoredCache,
    read_signing_key,
)
from kernel.errors import InvalidArgument
from kernel.testing import FakeClock
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from kernel.cache.interface import CachedResponse

OUTPUT = Tensor("OUT", "UINT8", [3], b"abc")


class FakeStore:
    """A store in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.calls = 0
        self.closed = False
        #: Raised by each call.
        self.error: Exception | None = None
        #: Each call waits for it.
        self.gate: asyncio.Event | None = None

    async def get(self, key: str) -> bytes | None:
        await self._called()
        return self.values.get(key)  # type: ignore[return-value]  # what a store might return

    async def put(self, key: str, value: bytes) -> None:
        await self._called()
        self.values[key] = value

    async def _called(self) -> None:
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self.closed = True


class Case:
    def __init__(self, **more: object) -> None:
        self.store, self.clock = FakeStore(), FakeClock()
        options: dict[str, object] = {"title": "the store", "timeout_s": 5, **more}
        self.cache = StoredCache(self.store, self.clock, **options)  # type: ignore[arg-type]

    def expected(self) -> dict[str, str]:
        """Return the datatypes of the model's outputs."""
        return {"OUT": "UINT8", "TEXT": "BYTES"}

    async def find(self, key: bytes = b"key") -> CachedResponse | None:
        found = asyncio.get_running_loop().create_future()
        self.cache.lookup(key, found.set_result, self.expected)
        result: CachedResponse | None = await found
        return result

    async def put(self, key: bytes = b"key", output: Tensor = OUTPUT) -> None:
        self.cache.insert(key, [output], None, self.expected)
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(scenario: Callable[[Case], Awaitable[None]], **more: object) -> None:
    async def main() -> None:
        case = Case(**more)
        async with asyncio.timeout(60):
            await scenario(case)
            await case.cache.close()
        assert case.store.closed

    asyncio.run(main())


def test_what_was_stored_is_found() -> None:
    async def scenario(case: Case) -> None:
        assert await case.find() is None
        await case.put()
        found = await case.find()
        assert found is not None
        assert [(t.name, t.shape, t.data) for t in found.outputs] == [("OUT", [3], b"abc")]
        assert [*case.store.values] == ["naiad:1:6b6579"]
        figures = case.cache.figures
        assert (figures.lookups, figures.hits, figures.failures, figures.not_stored) == (2, 1, 0, 0)

    run(scenario)


def test_other_work_is_done_while_a_response_with_many_strings_is_decoded() -> None:
    async def scenario(case: Case) -> None:
        await case.put(output=Tensor("TEXT", "BYTES", [MAX_STRINGS], bytes(4 * MAX_STRINGS)))
        turns = 0

        async def other_work() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(other_work())
        assert await case.find() is not None
        assert turns >= MAX_STRINGS // STRINGS_AT_ONCE
        other.cancel()

    run(scenario)


def test_a_store_that_fails_is_a_miss_and_is_soon_asked_no_more() -> None:
    async def scenario(case: Case) -> None:
        case.store.error = ConnectionError("refused")
        for _ in range(FAILURE_LIMIT):
            assert await case.find() is None
        assert case.store.calls == FAILURE_LIMIT
        assert await case.find() is None
        await case.put()
        assert case.store.calls == FAILURE_LIMIT
        assert (case.cache.figures.failures, case.cache.figures.not_stored) == (FAILURE_LIMIT, 1)

    run(scenario)


def test_a_store_that_works_again_is_used_again() -> None:
    async def scenario(case: Case) -> None:
        await case.put()
        case.store.error = ConnectionError("refused")
        for _ in range(FAILURE_LIMIT):
            await case.find()
        case.store.error = None
        assert await case.find() is None
        case.clock.advance(FIRST_PAUSE_NS)
        assert await case.find() is not None
        assert await case.find() is not None

    run(scenario)


def test_a_store_that_hangs_is_a_miss_after_the_timeout() -> None:
    async def scenario(case: Case) -> None:
        case.store.gate = asyncio.Event()
        assert await case.find() is None
        assert case.cache.figures.failures == 1

    run(scenario, timeout_s=0.01)


def test_values_that_are_no_responses_are_misses() -> None:
    async def scenario(case: Case) -> None:
        for value in (b"", b"rubbish", "text", b"x" * 100):
            case.store.values["naiad:1:6b6579"] = value
            assert await case.find() is None
        assert case.cache.figures.failures == 4
        case.store.values.clear()
        await case.put()
        assert await case.find() is not None, "such values do not make the store look as if it were down"

    run(scenario)


def test_large_responses_are_not_stored_and_large_values_not_taken() -> None:
    async def scenario(case: Case) -> None:
        await case.put(output=Tensor("OUT", "UINT8", [101], bytes(101)))
        assert case.store.values == {}
        case.store.values["naiad:1:6b6579"] = bytes(201)
        assert await case.find() is None
        assert (case.cache.figures.not_stored, case.cache.figures.failures) == (1, 1)

    run(scenario, value_limit=100)


def test_lookups_beyond_the_limit_are_misses_at_once() -> None:
    async def scenario(case: Case) -> None:
        case.store.gate = asyncio.Event()
        lookups = [asyncio.create_task(case.find()) for _ in range(MAX_LOOKUPS)]
        await settled()
        assert await case.find() is None
        assert case.store.calls == MAX_LOOKUPS
        case.store.gate.set()
        assert await asyncio.gather(*lookups) == [None] * MAX_LOOKUPS

    run(scenario)


def test_insertions_are_limited_in_number_and_bytes() -> None:
    async def scenario(case: Case) -> None:
        case.store.gate = asyncio.Event()
        for number in range(MAX_INSERTIONS + 1):
            case.cache.insert(bytes([number]), [OUTPUT], None, case.expected)
        assert case.cache.figures.not_stored == 1
        case.store.gate.set()
        await settled()
        assert len(case.store.values) == MAX_INSERTIONS
        case.store.gate.clear()
        large = Tensor("OUT", "UINT8", [MAX_INSERTED_BYTE_SIZE // 2], bytes(MAX_INSERTED_BYTE_SIZE // 2))
        for number in range(2):
            case.cache.insert(bytes([200 + number]), [large], None, case.expected)
        assert case.cache.figures.not_stored == 2
        case.store.gate.set()
        await settled()
        assert len(case.store.values) == MAX_INSERTIONS + 1

    run(scenario, value_limit=MAX_INSERTED_BYTE_SIZE)


def test_a_lookup_that_runs_when_the_cache_is_closed_finds_nothing() -> None:
    async def scenario(case: Case) -> None:
        case.store.gate = asyncio.Event()
        found: list[CachedResponse | None] = []
        case.cache.lookup(b"key", found.append, case.expected)
        await settled()
        await case.cache.close()
        assert found == [None]
        case.cache.lookup(b"key", found.append, case.expected)
        assert found == [None, None]

    run(scenario)


def test_a_value_that_the_model_could_not_have_sent_is_a_miss() -> None:
    async def scenario(case: Case) -> None:
        case.cache.insert(b"key", [Tensor("X", "UINT8", [1], b"a")], None, lambda: {"X": "UINT8"})
        await settled()
        assert len(case.store.values) == 1
        assert await case.find() is None
        assert case.cache.figures.failures == 1

    run(scenario)


def test_strings_with_wrong_lengths_are_a_miss() -> None:
    async def scenario(case: Case) -> None:
        await case.put(output=Tensor("TEXT", "BYTES", [1], b"\2\0\0\0hi"))
        assert await case.find() is not None
        await case.put(output=Tensor("TEXT", "BYTES", [1], b"\3\0\0\0hi"))
        assert await case.find() is None

    run(scenario)


def test_with_a_signing_key_only_signed_values_are_found() -> None:
    async def scenario(case: Case) -> None:
        await case.put()
        assert await case.find() is not None
        [(name, value)] = case.store.values.items()
        assert isinstance(value, bytes)
        for forged in (value[32:], bytes(32) + value[32:], value[:-1] + b"x"):
            case.store.values[name] = forged
            assert await case.find() is None
        await case.put(b"other")
        case.store.values[name] = case.store.values[name.replace(b"key".hex(), b"other".hex())]
        assert await case.find() is None, "the value of another key"

    run(scenario, signing=Signing(b"0123456789abcdef"))


def failed_breaker(now_ns: int = 0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    told = [breaker.failed(now_ns) for _ in range(FAILURE_LIMIT)]
    assert told == [False] * (FAILURE_LIMIT - 1) + [True]
    return breaker


def test_failures_with_a_success_between_them_do_not_stop_calls() -> None:
    breaker = CircuitBreaker()
    for _ in range(3 * FAILURE_LIMIT):
        assert breaker.allows(0)
        assert not breaker.failed(0)
        assert not breaker.succeeded()


def test_after_failures_in_a_row_no_call_is_made_for_a_time_and_then_one() -> None:
    breaker = failed_breaker(5)
    assert breaker.paused
    assert not breaker.allows(5 + FIRST_PAUSE_NS - 1)
    assert breaker.allows(5 + FIRST_PAUSE_NS)
    assert not breaker.allows(5 + FIRST_PAUSE_NS), "one call tries, the others wait for its result"


def test_a_try_that_succeeds_lets_all_calls_pass() -> None:
    breaker = failed_breaker()
    assert breaker.allows(FIRST_PAUSE_NS)
    assert breaker.succeeded()
    assert not breaker.paused
    assert breaker.allows(FIRST_PAUSE_NS)
    assert breaker.allows(FIRST_PAUSE_NS)


def test_each_try_that_fails_doubles_the_time_up_to_a_limit() -> None:
    breaker, now_ns, pauses = failed_breaker(), 0, []
    for _ in range(8):
        pause_ns = next(ns for ns in (FIRST_PAUSE_NS << i for i in range(10)) if breaker_allows(breaker, now_ns, ns))
        pauses.append(pause_ns)
        now_ns += min(pause_ns, LONGEST_PAUSE_NS)
        assert not breaker.failed(now_ns)
    assert pauses[:4] == [FIRST_PAUSE_NS, 2 * FIRST_PAUSE_NS, 4 * FIRST_PAUSE_NS, 8 * FIRST_PAUSE_NS]
    assert pauses[-1] == pauses[-2], "the time does not grow for ever"


def breaker_allows(breaker: CircuitBreaker, now_ns: int, pause_ns: int) -> bool:
    return breaker.allows(now_ns + min(pause_ns, LONGEST_PAUSE_NS))


def test_a_call_from_before_the_pause_that_fails_late_changes_nothing() -> None:
    breaker = failed_breaker()
    assert not breaker.failed(10)
    assert breaker.allows(FIRST_PAUSE_NS)


SIGNING = Signing(b"0123456789abcdef")


def test_a_signed_value_is_read_by_servers_with_the_key_only() -> None:
    stored = SIGNING.signed(b"key", b"value")
    assert bytes(Signing(b"0123456789abcdef").verified(b"key", stored)) == b"value"
    other = Signing(b"0123456789abcdeF")
    assert other.name != SIGNING.name
    with pytest.raises(BadEntry, match="a wrong signature"):
        other.verified(b"key", stored)


@pytest.mark.parametrize("change", [0, 31, 32, 36])
def test_a_changed_value_is_refused(change: int) -> None:
    stored = bytearray(SIGNING.signed(b"key", b"value"))
    stored[change] ^= 1
    with pytest.raises(BadEntry):
        SIGNING.verified(b"key", bytes(stored))


@pytest.mark.parametrize("stored", [b"", b"value", bytes(32), bytes(100)])
def test_an_unsigned_value_is_refused(stored: bytes) -> None:
    with pytest.raises(BadEntry):
        SIGNING.verified(b"key", stored)


def test_a_value_under_another_key_is_refused() -> None:
    with pytest.raises(BadEntry):
        SIGNING.verified(b"yek", SIGNING.signed(b"key", b"value"))


def test_the_key_is_the_content_of_its_file_without_line_feeds_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"0123456789abcdef\n")
    assert read_signing_key(str(tmp_path / "key")).name == SIGNING.name


def test_a_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"secret\n")
    os.mkfifo(tmp_path / "fifo")
    for name, reason in (("short", "16 to 4096 bytes"), ("absent", "No such file"), ("fifo", "it is a FIFO")):
        with pytest.raises(InvalidArgument, match=reason):
            read_signing_key(str(tmp_path / name))
