"""The end of a turn of the loop: decisions first, then what they and others send, each once."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from kernel.loop.iteration_end import IterationEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

RUNNERS = [asyncio.run, uvloop.run]


@pytest.fixture(params=RUNNERS, ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    runner: Callable[[Coroutine[Any, Any, None]], None] = request.param
    return runner


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_what_a_decision_sends_leaves_in_the_same_turn(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        seen: list[str] = []
        turn_end = IterationEnd.here()

        def decide() -> None:
            seen.append("decided")
            turn_end.leave(lambda: seen.append("second"))

        turn_end.leave(lambda: seen.append("first"))
        turn_end.decide(decide)
        asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(seen.append, "next turn"))
        assert seen == []
        await turns()
        assert seen == ["decided", "first", "second", "next turn"]

    run(scenario())


def test_the_loop_looks_for_input_between_two_decisions(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        loop, turn_end = asyncio.get_running_loop(), IterationEnd.here()
        ours, theirs = socket.socketpair()
        theirs.send(b"x")
        readable = asyncio.Event()
        loop.add_reader(ours.fileno(), readable.set)
        decisions = 0

        def again() -> None:
            nonlocal decisions
            decisions += 1
            if not readable.is_set():
                turn_end.decide(again)

        turn_end.decide(again)
        await readable.wait()  # for ever, if deciding anew ended no turn
        assert decisions > 0
        loop.remove_reader(ours.fileno())
        ours.close()
        theirs.close()

    run(scenario())


def test_one_that_fails_takes_no_other_along(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        errors: list[dict[str, Any]] = []
        seen: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

        def fail() -> None:
            raise ValueError("broken")

        for _ in range(2):
            turn_end = IterationEnd.here()
            turn_end.decide(fail)
            turn_end.decide(lambda: seen.append("decided"))
            turn_end.leave(fail)
            turn_end.leave(lambda: seen.append("left"))
            await turns()
        assert seen == ["decided", "left"] * 2
        assert [type(context["exception"]) for context in errors] == [ValueError] * 4

    run(scenario())


def test_all_on_a_loop_share_one_and_each_loop_has_its_own() -> None:
    async def scenario() -> IterationEnd:
        assert IterationEnd.here() is IterationEnd.here()
        return IterationEnd.here()

    assert asyncio.run(scenario()) is not asyncio.run(scenario())


def test_turns_go_on_after_an_exception_that_ends_programs() -> None:
    loop = asyncio.new_event_loop()
    seen: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def scenario(callback: Callable[[], None]) -> None:
        IterationEnd.here().leave(callback)
        await turns()

    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(scenario(interrupt))
    loop.run_until_complete(scenario(lambda: seen.append("left")))
    assert seen == ["left"]
    loop.close()
