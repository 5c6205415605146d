"""At the end of an event-loop iteration, decisions run first, then sends; each runs once."""

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


async def iterations(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_message_of_a_decision_is_sent_in_the_same_iteration(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def scenario() -> None:
        seen: list[str] = []
        iteration_end = IterationEnd.current()

        def decide() -> None:
            seen.append("decided")
            iteration_end.add_send(lambda: seen.append("second"))

        iteration_end.add_send(lambda: seen.append("first"))
        iteration_end.add_decision(decide)
        asyncio.get_running_loop().call_soon(
            lambda: asyncio.get_running_loop().call_soon(seen.append, "next iteration")
        )
        assert seen == []
        await iterations()
        assert seen == ["decided", "first", "second", "next iteration"]

    run(scenario())


def test_clients_are_written_to_after_all_sends(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        seen: list[str] = []
        iteration_end = IterationEnd.current()
        iteration_end.add_write(lambda: seen.append("written"))
        iteration_end.add_send(lambda: seen.append("sent"))
        await iterations()
        assert seen == ["sent", "written"]
        iteration_end.add_write(lambda: seen.append("written alone"))
        await iterations()
        assert seen == ["sent", "written", "written alone"]

    run(scenario())


def test_the_loop_reads_input_between_a_decision_and_one_that_it_adds(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def scenario() -> None:
        loop, iteration_end = asyncio.get_running_loop(), IterationEnd.current()
        ours, theirs = socket.socketpair()
        theirs.send(b"x")
        readable = asyncio.Event()
        loop.add_reader(ours.fileno(), readable.set)
        decisions = 0

        def again() -> None:
            nonlocal decisions
            decisions += 1
            if not readable.is_set():
                iteration_end.add_decision(again)

        iteration_end.add_decision(again)
        await readable.wait()  # waits forever if a decision that adds a decision did not end the iteration
        assert decisions > 0
        loop.remove_reader(ours.fileno())
        ours.close()
        theirs.close()

    run(scenario())


def test_after_a_callback_that_fails_the_others_still_run(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        errors: list[dict[str, Any]] = []
        seen: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

        def fail() -> None:
            raise ValueError("broken")

        for _ in range(2):
            iteration_end = IterationEnd.current()
            iteration_end.add_decision(fail)
            iteration_end.add_decision(lambda: seen.append("decided"))
            iteration_end.add_send(fail)
            iteration_end.add_send(lambda: seen.append("left"))
            await iterations()
        assert seen == ["decided", "left"] * 2
        assert [type(context["exception"]) for context in errors] == [ValueError] * 4

    run(scenario())


def test_each_loop_has_one_iteration_end() -> None:
    async def scenario() -> IterationEnd:
        assert IterationEnd.current() is IterationEnd.current()
        return IterationEnd.current()

    assert asyncio.run(scenario()) is not asyncio.run(scenario())


def test_callbacks_still_run_after_a_keyboard_interrupt() -> None:
    loop = asyncio.new_event_loop()
    seen: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def scenario(callback: Callable[[], None]) -> None:
        IterationEnd.current().add_send(callback)
        await iterations()

    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(scenario(interrupt))
    loop.run_until_complete(scenario(lambda: seen.append("left")))
    assert seen == ["left"]
    loop.close()
