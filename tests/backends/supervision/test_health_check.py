"""The kernel asks a worker whether its model is healthy: once at a time, and not for ever."""

from __future__ import annotations

import asyncio
import logging

import pytest

from backends.supervision import health_check
from backends.transport import wire
from tests.backends.supervision.played_worker import Bench, response, run, settle

LATE = "Model 'm_0' is not ready: is_ready() did not return within 0.01 s."
ENDED = "Model 'm_0' is not ready: its worker has ended."


async def asked(bench: Bench, count: int = 1) -> list[asyncio.Task[bool]]:
    """Ask a number of times at once, and let the question reach the worker."""
    answers = [asyncio.ensure_future(bench.model.health.ready()) for _ in range(count)]
    await settle()
    return answers


def test_all_who_ask_at_the_same_time_get_one_result() -> None:
    async def scenario(bench: Bench) -> None:
        for number, problem in ((1, ""), (2, "no"), (3, "")):
            answers = await asked(bench, 3)
            assert await bench.received() == [wire.CheckHealth(number)]
            await bench.say(wire.HealthChecked(number, problem))
            assert await asyncio.gather(*answers) == [not problem] * 3

    run(scenario, checks_health=True)


def test_a_model_without_a_check_is_not_asked() -> None:
    async def scenario(bench: Bench) -> None:
        assert not bench.model.health
        assert await bench.model.health.ready()
        assert await bench.received() == []

    run(scenario)


@pytest.mark.parametrize("message", [wire.HealthChecked(1), wire.HealthChecked(0)])
@pytest.mark.parametrize("checks", [False, True])
def test_a_response_that_nobody_asked_for_ends_the_worker(message: wire.HealthChecked, checks: bool) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.say(message)
        assert "it sent an invalid message" in bench.lost[0]

    run(scenario, checks_health=checks)


def test_a_worker_that_is_lost_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bench: Bench) -> None:
        check = bench.handle.health
        assert check is not None
        problem = asyncio.ensure_future(check.problem())
        await settle()
        bench.worker.die("exit code 1")
        assert await problem == ENDED
        assert await check.problem() == ENDED
        assert not bench.model.health

    run(scenario, checks_health=True)
    assert caplog.messages == [], "the loss is in the log already"


def test_an_idle_worker_that_is_silent_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health_check, "CHECK_TIMEOUT_S", 0.01)

    async def scenario(bench: Bench) -> None:
        for _ in range(2):
            assert not await bench.model.health.ready()
        assert await bench.received() == [wire.CheckHealth(1)], "it was asked, and has not responded"
        await bench.say(wire.HealthChecked(1))
        [answer] = await asked(bench)
        await bench.say(wire.HealthChecked(2))
        assert await answer

    run(scenario, checks_health=True)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [LATE], "once"


def test_the_last_response_of_a_worker_that_executes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check, "CHECK_TIMEOUT_S", 0.01)

    async def scenario(bench: Bench) -> None:
        bench.submit()
        assert await bench.model.health.ready(), "it never said anything else"
        await bench.say(wire.Executed(1, [response()]), wire.HealthChecked(1, "no"))
        bench.submit()
        assert not await bench.model.health.ready()
        await bench.say(wire.Executed(2, [response()]), wire.HealthChecked(2))

    run(scenario, checks_health=True)
