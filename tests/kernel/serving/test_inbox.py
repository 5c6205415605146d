"""The inbox steps its scheduler in the call that posts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from kernel.serving.events import DeadlineReached, Event, InstanceIdle
from kernel.serving.inbox import BadScheduler, Inbox
from kernel.testing import FakeClock, FakeInstance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

IDLE = InstanceIdle(FakeInstance("m_0"))


class Recorder:
    """A scheduler that notes what it gets and waits until the times it is told."""

    def __init__(self, *until_ns: int | None) -> None:
        self.seen: list[Event] = []
        self._until = list(until_ns)

    async def run(self, inbox: Inbox) -> None:
        while True:
            self.seen.append(await inbox.next(self._until.pop(0) if self._until else None))


@pytest.fixture
def crashes() -> list[Exception]:
    return []


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def inbox(clock: FakeClock, crashes: list[Exception]) -> Inbox:
    return Inbox(clock, crashes.append)


def test_an_event_is_handled_before_post_returns(inbox: Inbox) -> None:
    scheduler = Recorder()
    inbox.start(scheduler.run(inbox))
    inbox.post(IDLE)
    assert scheduler.seen == [IDLE]
    inbox.close()


def test_events_raised_during_a_step_wait_their_turn(inbox: Inbox) -> None:
    seen: list[str] = []

    async def scheduler() -> None:
        while True:
            event = await inbox.next()
            seen.append(f"start {type(event).__name__}")
            if isinstance(event, InstanceIdle):
                inbox.post(DeadlineReached())
            seen.append(f"end {type(event).__name__}")

    inbox.start(scheduler())
    inbox.post(IDLE)
    assert seen == ["start InstanceIdle", "end InstanceIdle", "start DeadlineReached", "end DeadlineReached"]
    inbox.close()


def test_the_deadline_comes_at_its_time(inbox: Inbox, clock: FakeClock) -> None:
    scheduler = Recorder(clock.now_ns() + 100)
    inbox.start(scheduler.run(inbox))
    clock.advance(99)
    assert scheduler.seen == []
    clock.advance(1)
    assert scheduler.seen == [DeadlineReached()]
    inbox.close()


def test_a_scheduler_that_raises_is_ended_and_reported(inbox: Inbox, crashes: list[Exception]) -> None:
    async def scheduler() -> None:
        await inbox.next()
        raise RuntimeError("no")

    inbox.start(scheduler())
    inbox.post(IDLE)
    assert [str(error) for error in crashes] == ["no"]
    inbox.post(IDLE)  # nobody is there: nothing happens


def test_a_scheduler_may_await_only_its_inbox(inbox: Inbox, crashes: list[Exception]) -> None:
    class Other:
        def __await__(self) -> Any:
            yield "something else"

    async def scheduler() -> None:
        await cast("Awaitable[None]", Other())

    with pytest.raises(BadScheduler, match="something else"):
        inbox.start(cast("Coroutine[int | None, Event, None]", scheduler()))
    assert not crashes


def test_a_scheduler_that_fails_before_its_first_wait_fails_its_start(inbox: Inbox, crashes: list[Exception]) -> None:
    async def broken() -> None:
        raise RuntimeError("no")

    async def sound() -> None:
        while True:
            await inbox.next()

    with pytest.raises(RuntimeError, match="no"):
        inbox.start(broken())
    inbox.start(sound())
    inbox.post(IDLE)
    assert not crashes


def test_a_scheduler_that_returns_is_reported(inbox: Inbox, crashes: list[Exception]) -> None:
    async def scheduler() -> None:
        await inbox.next()

    inbox.start(scheduler())
    inbox.post(IDLE)
    assert isinstance(crashes[0], BadScheduler)


def test_a_scheduler_that_replaces_a_failed_one_begins_before_the_events_that_came_meanwhile(clock: FakeClock) -> None:
    async def failing() -> None:
        await replacing.next()
        raise RuntimeError("no")

    after = Recorder()

    def replace(error: Exception) -> None:
        replacing.post(DeadlineReached())  # as a request does that is submitted when another is failed
        replacing.start(after.run(replacing))
        assert after.seen == []

    replacing = Inbox(clock, replace)
    replacing.start(failing())
    replacing.post(IDLE)
    assert after.seen == [DeadlineReached()]
    replacing.close()


def test_a_replacement_that_fails_at_its_start_is_not_started_again(clock: FakeClock) -> None:
    async def failing() -> None:
        await replacing.next()
        raise RuntimeError("first")

    async def broken() -> None:
        raise RuntimeError("second")

    failures: list[str] = []

    def replace(error: Exception) -> None:
        failures.append(str(error))
        with pytest.raises(RuntimeError, match="second"):
            replacing.start(broken())

    replacing = Inbox(clock, replace)
    replacing.start(failing())
    replacing.post(IDLE)
    replacing.post(IDLE)
    assert failures == ["first"]


def test_events_that_a_scheduler_posts_before_its_first_wait_come_with_the_next_one(inbox: Inbox) -> None:
    seen: list[Event] = []

    async def scheduler() -> None:
        inbox.post(DeadlineReached())
        while True:
            seen.append(await inbox.next())

    inbox.start(scheduler())
    inbox.post(IDLE)
    assert sorted(type(event).__name__ for event in seen) == ["DeadlineReached", "InstanceIdle"]
    inbox.close()


def test_the_log_says_whose_scheduler_has_failed(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> None:
        await named.next()
        raise RuntimeError("no")

    named = Inbox(clock, lambda error: None, "digits")
    named.start(failing())
    named.post(IDLE)
    assert "the scheduler of model 'digits' failed" in caplog.text
