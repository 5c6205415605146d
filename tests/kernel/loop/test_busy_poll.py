"""The kernel polls during waits that are expected to be short, and sleeps during all others."""

from __future__ import annotations

import asyncio

import pytest

from kernel.loop.busy_poll import BUSY_DIVISOR, BUSY_NS, BUSY_SUM_NS, GOOD_PAUSES, BusyPolling, LoopPoller, PollPause

LONGEST_NS = 200_000
SHORT_NS, LONG_NS = 50_000, 300_000


class PolledServer:
    """A server with a fake time."""

    def __init__(self, longest_ns: int = LONGEST_NS, processor_count: int = 2) -> None:
        self.polling = BusyPolling(longest_ns, processor_count)
        self.now_ns = 10**15

    def wakes(self, waited_ns: int, in_flight: int) -> bool:
        """Sleep for `waited_ns`. Returns whether to poll during the next wait."""
        self.now_ns += waited_ns
        self.polling.in_flight = in_flight
        return self.polling.woke(self.now_ns)

    def polls(self, waited_ns: int, in_flight: int, *, moved: bool = False, away_ns: int = 1_000) -> bool:
        """Poll once, `waited_ns` later. Returns whether to continue."""
        self.now_ns += waited_ns
        self.polling.in_flight = in_flight
        return self.polling.keeps_polling(self.now_ns, away_ns, moved=moved)


def test_the_first_waits_are_expected_to_be_long() -> None:
    server = PolledServer()
    assert not server.wakes(LONG_NS, in_flight=1)
    assert not server.wakes(SHORT_NS, in_flight=0)


def test_waits_for_workers_and_waits_for_clients_have_separate_expectations() -> None:
    server = PolledServer()
    server.wakes(LONG_NS, in_flight=1)
    server.wakes(SHORT_NS, in_flight=0)  # a fast model
    assert server.wakes(LONG_NS, in_flight=1), "the client was slow, the model fast"
    assert not server.polls(SHORT_NS, in_flight=0, moved=True)


def test_polling_continues_while_waits_are_short() -> None:
    server = PolledServer()
    server.wakes(LONG_NS, in_flight=1)
    server.wakes(SHORT_NS, in_flight=0)
    assert server.wakes(SHORT_NS, in_flight=1)
    for _ in range(10):
        assert server.polls(SHORT_NS, in_flight=1)
        assert server.polls(SHORT_NS, in_flight=0, moved=True)
        assert server.polls(SHORT_NS, in_flight=1, moved=True)


def test_polling_ends_in_a_long_wait_and_does_not_start_in_the_next_of_its_kind() -> None:
    server = PolledServer()
    server.wakes(SHORT_NS, in_flight=1)
    server.wakes(SHORT_NS, in_flight=0)
    assert server.wakes(SHORT_NS, in_flight=1)
    assert server.polls(LONGEST_NS - 1, in_flight=1)
    assert not server.polls(1, in_flight=1)
    assert server.wakes(1, in_flight=0), "clients were fast"
    assert not server.polls(1, in_flight=1, moved=True), "the model was slow"


@pytest.mark.parametrize(("in_flight", "keeps_polling"), [(0, True), (1, True), (2, False), (32, False)])
def test_with_many_in_flight_polling_stops_when_others_need_the_processor(in_flight: int, keeps_polling: bool) -> None:
    server = PolledServer()
    for _ in range(2):
        server.wakes(SHORT_NS, in_flight)
    assert server.polls(SHORT_NS, in_flight)
    assert server.polls(SHORT_NS, in_flight, away_ns=50_000) is keeps_polling
    assert server.wakes(SHORT_NS, in_flight), "the next message starts polling again"


def test_nobody_polls_while_more_workers_are_busy_than_there_are_processors() -> None:
    """Each of them has to run once before the wait ends: who polls and yields waits for all of them."""
    server = PolledServer(processor_count=2)
    server.polling.busy_workers = 3
    server.wakes(LONG_NS, in_flight=1)
    assert not server.wakes(SHORT_NS, in_flight=1)
    server.polling.busy_workers = 2
    assert server.wakes(SHORT_NS, in_flight=1)
    assert server.polls(SHORT_NS, in_flight=1, moved=True)
    server.polling.busy_workers = 3
    assert not server.polls(SHORT_NS, in_flight=1, moved=True)


def test_nobody_polls_while_only_slow_models_are_executed() -> None:
    """Requests that come meanwhile make each wait short, but not the one for the model."""
    server = PolledServer()
    for _ in range(2):
        server.wakes(SHORT_NS, in_flight=1)
    assert server.wakes(SHORT_NS, in_flight=1)
    polling = server.polling
    polling.busy_workers, polling.slow_workers = 1, 1
    assert not server.wakes(SHORT_NS, in_flight=1)
    polling.busy_workers = 2
    assert server.wakes(SHORT_NS, in_flight=2), "the response of the fast model comes soon"
    assert server.polls(SHORT_NS, in_flight=2, moved=True)
    assert polling.worker_ends(SHORT_NS, slow=False) is False, "it is fast next time, too"
    assert not server.polls(SHORT_NS, in_flight=1, moved=True)
    assert polling.worker_ends(LONGEST_NS, slow=True) is True
    assert server.wakes(SHORT_NS, in_flight=1)


def test_polling_pauses_on_busy_processors_even_with_one_request_in_flight() -> None:
    server = PolledServer()
    for _ in range(2):
        server.wakes(SHORT_NS, in_flight=1)
    assert server.polls(BUSY_SUM_NS - 1, in_flight=1, away_ns=BUSY_SUM_NS - 1, moved=True)
    assert not server.polls(SHORT_NS, in_flight=1, away_ns=BUSY_SUM_NS // 2, moved=True)
    assert not server.wakes(SHORT_NS, in_flight=1)
    server.wakes(10**9, in_flight=1)
    assert server.wakes(SHORT_NS, in_flight=1)


def test_occasional_long_yields_do_not_pause_polling() -> None:
    poll_pause, now_ns = PollPause(), 10**15
    for _ in range(100):
        now_ns += BUSY_DIVISOR * BUSY_NS
        assert poll_pause.yielded(now_ns, BUSY_NS)
    assert poll_pause.until_ns == 0


def pauses(tries_ns: list[int]) -> list[int]:
    """Return the pauses in milliseconds; before each pause, polling works for the given time."""
    poll_pause, now_ns, found = PollPause(), 10**15, []
    for good_ns in tries_ns:
        assert poll_pause.until_ns <= now_ns
        now_ns += good_ns
        assert poll_pause.yielded(now_ns, BUSY_NS - 1)
        assert poll_pause.yielded(now_ns, BUSY_SUM_NS - 1)
        now_ns += BUSY_DIVISOR
        assert not poll_pause.yielded(now_ns, BUSY_SUM_NS)
        found.append((poll_pause.until_ns - now_ns) // 10**6)
        now_ns = poll_pause.until_ns
    return found


def test_pauses_that_follow_each_other_soon_double_up_to_a_limit() -> None:
    assert pauses([0] * 7) == [100, 200, 400, 800, 1600, 1600, 1600]


def test_a_pause_is_short_again_after_polling_has_worked_for_long() -> None:
    assert pauses([0, 10**6, GOOD_PAUSES * 200 * 10**6, 0]) == [100, 200, 100, 200]


@pytest.mark.parametrize(("longest_ns", "processor_count"), [(0, 8), (LONGEST_NS, 1)])
def test_without_poll_time_or_a_second_processor_there_is_no_polling(longest_ns: int, processor_count: int) -> None:
    server = PolledServer(longest_ns, processor_count)
    assert not server.wakes(0, in_flight=1)
    assert not server.wakes(0, in_flight=0)
    assert not server.wakes(0, in_flight=1)
    assert server.polling.worker_ns == 0


def test_workers_may_poll_while_each_request_has_a_processor() -> None:
    polling = BusyPolling(LONGEST_NS, processor_count=4)
    polling.in_flight = 4
    assert polling.worker_ns == LONGEST_NS
    polling.in_flight = 5
    assert polling.worker_ns == 0


class ScriptedPolling(BusyPolling):
    """Returns the given decisions, and records its calls."""

    def __init__(self, *decisions: bool) -> None:
        super().__init__(LONGEST_NS, 2)
        self.decisions = list(decisions)
        self.calls: list[object] = []

    def woke(self, now_ns: int) -> bool:
        self.calls.append("woke")
        return bool(self.decisions)

    def keeps_polling(self, now_ns: int, away_ns: int, *, moved: bool) -> bool:
        assert away_ns >= 0
        self.calls.append(moved)
        return self.decisions.pop(0)


def test_the_poller_runs_in_each_iteration_until_polling_ends() -> None:
    async def scenario() -> None:
        polling = ScriptedPolling(True, True, True, False)
        poller = LoopPoller(polling)
        poller.moved(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        poller.moved(-1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert polling.calls == ["woke", False, False, True, False]
        assert polling.in_flight == 0
        poller.moved(1)
        assert polling.calls[5:] == ["woke"]

    asyncio.run(scenario())


def test_with_many_requests_in_flight_polling_does_not_start() -> None:
    async def scenario() -> None:
        polling = ScriptedPolling()
        poller = LoopPoller(polling)
        poller.moved(polling.max_in_flight + 2)
        poller.moved(-1)
        assert polling.calls == []
        poller.moved(-1)
        assert polling.calls == ["woke"]

    asyncio.run(scenario())


def test_a_sleeping_loop_does_not_poll_after_long_waits() -> None:
    async def scenario() -> None:
        polling = ScriptedPolling()
        poller = LoopPoller(polling)
        poller.moved(1)
        await asyncio.sleep(0)
        poller.moved(-1)
        await asyncio.sleep(0)
        assert polling.calls == ["woke", "woke"]

    asyncio.run(scenario())
