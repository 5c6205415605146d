"""What holds an event loop up is found on both loops, and only that."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from tests.slow_callbacks import LIMIT_NS, collected
from tests.watched_server import HELD_UP

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

Found = Callable[[Callable[[], Coroutine[None, None, None]]], list[str]]


@pytest.fixture(params=LOOPS)
def found(request: pytest.FixtureRequest) -> Found:
    """Runs a scenario on one of the loops, and returns what held the loop up."""

    def run(scenario: Callable[[], Coroutine[None, None, None]]) -> list[str]:
        with collected() as lines, asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(scenario())
        return lines

    return run


def compute() -> None:
    """Take more time of the processor than a callback may."""
    end_ns = time.thread_time_ns() + LIMIT_NS * 12 // 10
    while time.thread_time_ns() < end_ns:
        pass


def test_a_step_of_a_coroutine_that_computes_for_long_is_found(found: Found) -> None:
    async def scenario() -> None:
        await asyncio.sleep(0)
        compute()

    [line] = found(scenario)
    assert "computed for" in line


@pytest.mark.parametrize("schedule", ["call_soon", "call_later", "call_at", "add_reader", "call_soon_threadsafe"])
def test_a_callback_that_computes_for_long_is_found(found: Found, schedule: str) -> None:
    async def scenario() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        ours, theirs = socket.socketpair()

        def slow() -> None:
            compute()
            loop.remove_reader(ours)
            done.set()

        with ours, theirs:
            theirs.send(b"a")
            before: dict[str, object] = {"call_later": 0.001, "call_at": loop.time(), "add_reader": ours}
            getattr(loop, schedule)(*([before[schedule]] if schedule in before else []), slow)
            await done.wait()

    [line] = found(scenario)
    assert "slow" in line


def test_a_method_of_a_protocol_that_computes_for_long_is_found(found: Found) -> None:
    class Slow(asyncio.Protocol):
        def __init__(self) -> None:
            self.done = asyncio.Event()

        def data_received(self, data: bytes) -> None:
            compute()
            self.done.set()

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            transport, protocol = await asyncio.get_running_loop().create_connection(Slow, sock=ours)
            theirs.send(b"a")
            await protocol.done.wait()
            transport.abort()

    assert len(found(scenario)) == 1


def test_a_callback_that_sleeps_is_found(found: Found) -> None:
    async def scenario() -> None:
        time.sleep(0.001)  # noqa: ASYNC251  # what is looked for

    assert found(scenario) == ["a callback slept for 1 ms"]


def test_waiting_other_threads_and_collections_of_garbage_are_nobodys_fault(found: Found) -> None:
    async def scenario() -> None:
        await asyncio.to_thread(compute)
        await asyncio.to_thread(time.sleep, 0.001)
        end_ns = time.thread_time_ns() + LIMIT_NS * 12 // 10
        while time.thread_time_ns() < end_ns:
            gc.collect()

    assert found(scenario) == []


WATCHED = """
import time
from tests.watched_server import report
from tests import slow_callbacks
slow_callbacks.watch(report)
import uvloop

def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

async def main():
    import asyncio
    asyncio.get_running_loop().call_soon(compute, slow_callbacks.LIMIT_NS * 1.2e-9)
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(compute, 0.001)
    await asyncio.sleep(0.01)

uvloop.run(main())
"""


def test_a_watched_process_prints_what_holds_its_loop_up() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith(HELD_UP)
    assert "compute" in line
