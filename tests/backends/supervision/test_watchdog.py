"""One timer for all instances, whose time stands still while the event loop is held up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from backends.supervision.watchdog import LOOK_INTERVAL_S, Watchdog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest


class Seen:
    """Notes the times of the looks."""

    def __init__(self, limit_s: float = 0) -> None:
        self.shortest_limit_s = limit_s
        self.looks: list[int] = []
        self.looked = asyncio.Event()
        self.on_look: Callable[[], None] = lambda: None

    def look(self, now_ns: int) -> None:
        self.looks.append(now_ns)
        self.looked.set()
        self.on_look()


class Time:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def intervals(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that gets the delays of all timers that are set."""
    found: list[float] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def noting(delay: float, *arguments: object) -> asyncio.TimerHandle:
        found.append(delay)
        return later(delay, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_later", noting)
    return found


def test_it_looks_at_all_again_and_again() -> None:
    async def scenario() -> None:
        watchdog = Watchdog()
        first, second = Seen(0.04), Seen()
        for each in (first, second):
            watchdog.add(each)
        for _ in range(3):
            first.looked.clear()
            await first.looked.wait()
        assert len(second.looks) >= 2
        assert first.looks == sorted(first.looks)
        assert first.looks[-1] > first.looks[0]
        watchdog.remove(first)
        watchdog.remove(second)
        watchdog.remove(second)

    run(scenario)


def test_without_instances_there_is_no_timer_and_the_shortest_limit_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        delays = intervals(monkeypatch)
        watchdog = Watchdog(Time())
        slow, fast = Seen(60), Seen(0.4)
        assert delays == []
        watchdog.add(slow)
        watchdog.add(fast)
        watchdog.add(slow)
        assert delays == [LOOK_INTERVAL_S, 0.1]
        watchdog.remove(fast)
        watchdog.look()
        assert delays == [LOOK_INTERVAL_S, 0.1, LOOK_INTERVAL_S]
        watchdog.remove(slow)
        watchdog.look()
        assert delays == [LOOK_INTERVAL_S, 0.1, LOOK_INTERVAL_S]

    run(scenario)


def test_its_time_stands_still_while_the_event_loop_is_held_up() -> None:
    async def scenario() -> None:
        time = Time()
        watchdog, seen = Watchdog(time), Seen()
        watchdog.add(seen)
        for now_s in (0.5, 1.0, 100.0, 100.5):
            time.now_ns = int(now_s * 1e9)
            watchdog.look()
        assert [look / 1e9 for look in seen.looks] == [0.5, 1.0, 2.0, 2.5]
        watchdog.remove(seen)

    run(scenario)


def test_a_look_that_fails_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        watchdog, failing, other = Watchdog(), Seen(), Seen()

        def fail() -> None:
            raise KeyError("no")

        failing.on_look = fail
        for each in (failing, other):
            watchdog.add(each)
        watchdog.look()
        watchdog.look()
        assert len(other.looks) == 2
        for each in (failing, other):
            watchdog.remove(each)

    run(scenario)
    assert "the watchdog could not check" in caplog.text


def test_an_instance_may_leave_while_it_is_looked_at() -> None:
    async def scenario() -> None:
        watchdog, leaving, other = Watchdog(), Seen(), Seen()
        leaving.on_look = lambda: watchdog.remove(leaving)
        for each in (leaving, other):
            watchdog.add(each)
        watchdog.look()
        watchdog.look()
        assert (len(leaving.looks), len(other.looks)) == (1, 2)
        watchdog.remove(other)

    run(scenario)
