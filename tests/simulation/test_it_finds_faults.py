"""The simulation finds faults: each test puts one into the code, and sees that a seed fails and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from backends.supervision.calls import CallerCalls
from backends.supervision.handle import WorkerHandle
from kernel.serving.calls import Calls, CallWaits
from kernel.serving.events import (
    Cancelled,
    DeadlineReached,
    InstanceIdle,
    InstanceLost,
    NoInstanceLeft,
)
from kernel.serving.instances import InstanceSet
from kernel.serving.request import Request
from schedulers.dynamic_batcher import BatchKeys, DynamicBatcher
from schedulers.queue import RequestQueue
from schedulers.ratelimit import RateLimiter
from schedulers.registry import choose_scheduler
from tests.simulation.run import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.events import Event
    from kernel.serving.inbox import Inbox
    from tests.simulation.run import Failure

#: A fault must be found within as many seeds.
MOST_SEEDS = 400

pytestmark = [pytest.mark.slow, pytest.mark.slow_loop("a scenario of a thousand steps is one piece of work")]


#: Faults in calls between models: only scenarios with such models are run.
IN_CALLS = (Calls, CallWaits, CallerCalls)


def found(schedule: Callable[..., Any] = choose_scheduler, only: str = "") -> Failure:
    """Return the shortened failure of the first seed that fails."""
    with Simulation(schedule, only) as simulation:
        for seed in range(MOST_SEEDS):
            if failure := simulation.seed(seed):
                return simulation.shortened(failure)
    raise AssertionError(f"no fault was found with {MOST_SEEDS} seeds")


class ForgetfulInbox:
    """An inbox that loses events of one type."""

    def __init__(self, inbox: Inbox, lost: type[Event]) -> None:
        self._inbox = inbox
        self._lost = lost

    async def next(self, until_ns: int | None = None) -> Event:
        while isinstance(event := await self._inbox.next(until_ns), self._lost):
            until_ns = None
        return event


@pytest.mark.parametrize("lost", [InstanceLost, Cancelled, NoInstanceLeft, InstanceIdle, DeadlineReached])
@pytest.mark.parametrize("only", ["direct", "dynamic"])
def test_a_scheduler_that_ignores_an_event_is_found(only: str, lost: type[Event]) -> None:
    if only == "direct" and lost is DeadlineReached:
        pytest.skip("without its deadlines, a busy instance gets its next request when it is idle")

    def forgetful(
        spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock, **more: Any
    ) -> Coroutine[int | None, Event, None]:
        return choose_scheduler(spec, ForgetfulInbox(inbox, lost), instances, clock, **more)  # type: ignore[arg-type]

    failure = found(forgetful, only)
    # Some come before: a model gets nothing ahead of time before it is known how long it executes.
    assert len(failure.scenario.actions) <= 16, failure.text()
    assert len(failure.text(last=0).splitlines()) <= 60


def ignoring(*_: object) -> None:
    """Do nothing."""


def without_forget(self: WorkerHandle, cause: str, error: Any = None) -> None:
    """Lose a worker that stays in service while its requests fail."""
    instances = self._model.instances
    forget = instances.forget
    instances.forget = ignoring  # type: ignore[method-assign, assignment]
    try:
        REAL_LOST(self, cause, error)
    finally:
        instances.forget = forget  # type: ignore[method-assign]
    forget(self)


REAL_LOST = WorkerHandle.lost
REAL_CANCEL = RequestQueue.cancel
REAL_TAKE = RequestQueue.take


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a lost worker is in service while its requests fail": (WorkerHandle, "lost", without_forget),
    "requests of a lost worker are dropped": (DynamicBatcher, "put_back", ignoring),
    "shapes are not compared": (BatchKeys, "key", lambda self, request: None),
    "timeouts are ignored": (RequestQueue, "expire", lambda self, now_ns: []),
    "a cancelled request stays in the queue": (RequestQueue, "cancel", lambda self, request: False),
    "leases are kept": (Request, "release_leases", ignoring),
    "the newest goes first": (RequestQueue, "take", lambda self, count: REAL_TAKE(self, count)[::-1]),
    "nobody wakes up after the delay": (DynamicBatcher, "wait_until_ns", lambda self: None),
    "no delay ever ends": (DynamicBatcher, "take", lambda self, now_ns: []),
    "resources are given twice": (RateLimiter, "_fits", lambda self, needs, kept: True),
    "resources are never given back": (RateLimiter, "ended", ignoring),
    "who waits for resources is not woken": (RateLimiter, "wake_waiting", ignoring),
    "an idle instance tells nobody": (InstanceSet, "_post_idle", ignoring),
    "a circle of calls is not seen": (Calls, "_look_at", ignoring),
    "circles of calls are only seen at once": (Calls, "_look", ignoring),
    "a worker that waits for a call keeps its batches": (InstanceSet, "note_calls", ignoring),
    "batches that were recalled are dropped": (InstanceSet, "recalled", ignoring),
    "calls of a lost worker go on": (CallerCalls, "close", ignoring),
    "results of calls are kept": (CallerCalls, "released", ignoring),
    "calls that have ended are remembered": (CallWaits, "remove", ignoring),
    "what waits is thought to be stuck": (CallWaits, "youngest_stuck", lambda self, call, now_ns: call),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, faulty = FAULTS[fault]
    monkeypatch.setattr(owner, name, faulty)
    failure = found(only="calls" if owner in IN_CALLS or "call" in fault else "")
    assert len(failure.scenario.actions) <= 12, failure.text()


def test_a_batch_above_its_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = DynamicBatcher.__init__

    def generous(self: DynamicBatcher, *arguments: Any) -> None:
        make(self, *arguments)
        self._max_rows += 1

    monkeypatch.setattr(DynamicBatcher, "__init__", generous)
    assert "its limit is" in str(found().error)


def test_a_request_with_two_final_responses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Request.fail

    def fail_twice(self: Request, error: Any) -> None:
        fail(self, error)
        fail(self, error)

    monkeypatch.setattr(Request, "fail", fail_twice)
    assert "after its final one" in str(found().error)
