"""The kernel polls through waits that are expected to be short, and sleeps through all others."""

from __future__ import annotations

import asyncio

import pytest

from kernel.loop.busy_poll import BUSY_NS, BUSY_PARTS, BUSY_SUM_NS, GOOD_PAUSES, BusyPolling, GivingWay, LoopPoller

LONGEST_NS = 200_000
SHORT_NS, LONG_NS = 50_000, 300_000


class Story:
    """A server with two processors and the time that passes there."""

    def __init__(self, longest_ns: int = LONGEST_NS, processor_count: int = 2) -> None:
        self.polling = BusyPolling(longest_ns, processor_count)
        self.now_ns = 10**15

    def slept(self, waited_ns: int, in_flight: int) -> bool:
        self.now_ns += waited_ns
        self.polling.in_flight = in_flight
        return self.polling.woke(self.now_ns)

    def turned(self, waited_ns: int, in_flight: int, *, moved: bool = False, away_ns: int = 1_000) -> bool:
        self.now_ns += waited_ns
        self.polling.in_flight = in_flight
        return self.polling.goes_on(self.now_ns, away_ns, moved=moved)


def test_what_is_not_known_to_be_short_is_slept_through() -> None:
    story = Story()
    assert not story.slept(LONG_NS, in_flight=1)
    assert not story.slept(SHORT_NS, in_flight=0)


def test_waits_for_workers_and_for_clients_are_expected_apart() -> None:
    story = Story()
    story.slept(LONG_NS, in_flight=1)
    story.slept(SHORT_NS, in_flight=0)  # a fast model
    assert story.slept(LONG_NS, in_flight=1), "of a client that takes its time"
    assert not story.turned(SHORT_NS, in_flight=0, moved=True)


def test_it_polls_on_while_things_come_soon() -> None:
    story = Story()
    story.slept(LONG_NS, in_flight=1)
    story.slept(SHORT_NS, in_flight=0)
    assert story.slept(SHORT_NS, in_flight=1)
    for _ in range(10):
        assert story.turned(SHORT_NS, in_flight=1)
        assert story.turned(SHORT_NS, in_flight=0, moved=True)
        assert story.turned(SHORT_NS, in_flight=1, moved=True)


def test_a_wait_that_becomes_long_is_slept_through_and_so_is_the_next_like_it() -> None:
    story = Story()
    story.slept(SHORT_NS, in_flight=1)
    story.slept(SHORT_NS, in_flight=0)
    assert story.slept(SHORT_NS, in_flight=1)
    assert story.turned(LONGEST_NS - 1, in_flight=1)
    assert not story.turned(1, in_flight=1)
    assert story.slept(1, in_flight=0), "clients were fast"
    assert not story.turned(1, in_flight=1, moved=True), "the model was slow"


@pytest.mark.parametrize(("in_flight", "goes_on"), [(0, True), (1, True), (2, False), (32, False)])
def test_with_many_in_flight_it_gives_way_to_whoever_wants_the_processor(in_flight: int, goes_on: bool) -> None:
    story = Story()
    for _ in range(2):
        story.slept(SHORT_NS, in_flight)
    assert story.turned(SHORT_NS, in_flight)
    assert story.turned(SHORT_NS, in_flight, away_ns=50_000) is goes_on
    assert story.slept(SHORT_NS, in_flight), "and tries again at the next move"


def test_where_processors_are_busy_it_sleeps_for_a_while_even_with_one_in_flight() -> None:
    story = Story()
    for _ in range(2):
        story.slept(SHORT_NS, in_flight=1)
    assert story.turned(BUSY_SUM_NS - 1, in_flight=1, away_ns=BUSY_SUM_NS - 1, moved=True)
    assert not story.turned(SHORT_NS, in_flight=1, away_ns=BUSY_SUM_NS // 2, moved=True)
    assert not story.slept(SHORT_NS, in_flight=1)
    story.slept(10**9, in_flight=1)
    assert story.slept(SHORT_NS, in_flight=1)


def test_who_takes_the_processor_now_and_then_does_not_end_polling() -> None:
    giving_way, now_ns = GivingWay(), 10**15
    for _ in range(100):
        now_ns += BUSY_PARTS * BUSY_NS
        assert giving_way.gave(now_ns, BUSY_NS)
    assert giving_way.until_ns == 0


def pauses(tries_ns: list[int]) -> list[int]:
    """Return for how many milliseconds polling ends, where each try goes well for so long before it ends."""
    giving_way, now_ns, found = GivingWay(), 10**15, []
    for good_ns in tries_ns:
        assert giving_way.until_ns <= now_ns
        now_ns += good_ns
        assert giving_way.gave(now_ns, BUSY_NS - 1)
        assert giving_way.gave(now_ns, BUSY_SUM_NS - 1)
        now_ns += BUSY_PARTS
        assert not giving_way.gave(now_ns, BUSY_SUM_NS)
        found.append((giving_way.until_ns - now_ns) // 10**6)
        now_ns = giving_way.until_ns
    return found


def test_pauses_grow_while_every_try_ends_soon_and_have_an_end() -> None:
    assert pauses([0] * 7) == [100, 200, 400, 800, 1600, 1600, 1600]


def test_a_pause_is_short_again_after_it_went_well_for_long() -> None:
    assert pauses([0, 10**6, GOOD_PAUSES * 200 * 10**6, 0]) == [100, 200, 100, 200]


@pytest.mark.parametrize(("longest_ns", "processor_count"), [(0, 8), (LONGEST_NS, 1)])
def test_without_time_or_a_second_processor_nobody_polls(longest_ns: int, processor_count: int) -> None:
    story = Story(longest_ns, processor_count)
    assert not story.slept(0, in_flight=1)
    assert not story.slept(0, in_flight=0)
    assert not story.slept(0, in_flight=1)
    assert story.polling.worker_ns == 0


def test_workers_may_poll_while_there_is_a_processor_for_each_request() -> None:
    polling = BusyPolling(LONGEST_NS, processor_count=4)
    polling.in_flight = 4
    assert polling.worker_ns == LONGEST_NS
    polling.in_flight = 5
    assert polling.worker_ns == 0


class Scripted(BusyPolling):
    """Says what it is told to, and notes what it is asked."""

    def __init__(self, *goes_on: bool) -> None:
        super().__init__(LONGEST_NS, 2)
        self.answers = list(goes_on)
        self.asked: list[object] = []

    def woke(self, now_ns: int) -> bool:
        self.asked.append("woke")
        return bool(self.answers)

    def goes_on(self, now_ns: int, away_ns: int, *, moved: bool) -> bool:
        assert away_ns >= 0
        self.asked.append(moved)
        return self.answers.pop(0)


def test_the_loop_is_kept_turning_until_polling_ends() -> None:
    async def scenario() -> None:
        polling = Scripted(True, True, True, False)
        poller = LoopPoller(polling)
        poller.moved(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        poller.moved(-1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert polling.asked == ["woke", False, False, True, False]
        assert polling.in_flight == 0
        poller.moved(1)
        assert polling.asked[5:] == ["woke"]

    asyncio.run(scenario())


def test_with_many_in_flight_nothing_is_asked() -> None:
    async def scenario() -> None:
        polling = Scripted()
        poller = LoopPoller(polling)
        poller.moved(polling.most_in_flight + 2)
        poller.moved(-1)
        assert polling.asked == []
        poller.moved(-1)
        assert polling.asked == ["woke"]

    asyncio.run(scenario())


def test_what_sleeps_goes_on_to_sleep() -> None:
    async def scenario() -> None:
        polling = Scripted()
        poller = LoopPoller(polling)
        poller.moved(1)
        await asyncio.sleep(0)
        poller.moved(-1)
        await asyncio.sleep(0)
        assert polling.asked == ["woke", "woke"]

    asyncio.run(scenario())
