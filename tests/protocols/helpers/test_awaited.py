"""Tasks that a coroutine waits for: their results, their errors, and what is released when nobody waits any more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kernel.errors import InternalError, InvalidArgument, RequestCancelled
from kernel.testing import model_spec
from protocols.helpers.awaited import AwaitedTask
from protocols.testing import FrontDoorLab, LateHelpers
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.helper_tasks import HelperTask
    from kernel.serving.request import Request
    from kernel.serving.response import Response


class Helpers(LateHelpers):
    """Keeps the tasks for the test, which does what a helper does."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[HelperTask] = []

    def add(self, task: HelperTask) -> None:
        self.tasks.append(task)


class Lab(FrontDoorLab):
    def __init__(self) -> None:
        super().__init__()
        self.given = Helpers()
        self.kernel.helpers = self.given
        self.requests: list[Request] = []
        self.add_model(model_spec(dims=(-1,)), self.requests.append)

    def source(self) -> Tensor:
        return Tensor("", "UINT8", [5000], None, self.kernel.memory_for_helper(5000).span)

    @property
    def block_count(self) -> int:
        arenas = [self.kernel.resolve("model").input_arena, self.kernel._inputs._message_arena]
        return sum(arena.allocator.block_count for arena in arenas if arena is not None)


def run(test: Callable[[Lab], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test(Lab())

    asyncio.run(main())


def test_a_task_returns_its_result_and_releases_its_sources() -> None:
    async def test(lab: Lab) -> None:
        task = AwaitedTask(
            lab.kernel, "n", b"", [lab.source()], lambda message: lab.kernel.memory_for_helper(len(message))
        )
        running = asyncio.ensure_future(task.run())
        await asyncio.sleep(0)
        span = task.needs_memory(b"12345")
        assert (span.byte_size, lab.block_count) == (5, 2)
        task.done(b"result", None)
        assert await running == (b"result", None)
        assert task.memory is not None
        task.memory.release()
        assert lab.block_count == 0

    run(test)


def test_a_task_raises_its_error_and_releases_everything() -> None:
    async def test(lab: Lab) -> None:
        task = AwaitedTask(lab.kernel, "n", b"", [lab.source()], lambda message: lab.kernel.memory_for_helper(10))
        running = asyncio.ensure_future(task.run())
        await asyncio.sleep(0)
        task.needs_memory(b"")
        task.failed(InvalidArgument("wrong"))
        with pytest.raises(InvalidArgument, match="wrong"):
            await running
        assert lab.block_count == 0

    run(test)


@pytest.mark.parametrize("when", ["before its memory", "before its result", "with its result"])
def test_what_nobody_waits_for_is_released_when_the_helper_has_ended(when: str) -> None:
    async def test(lab: Lab) -> None:
        task = AwaitedTask(lab.kernel, "n", b"", [lab.source()], lambda message: lab.kernel.memory_for_helper(10))
        output = lab.source()
        running = asyncio.ensure_future(task.run())
        await asyncio.sleep(0)
        if when == "with its result":
            task.needs_memory(b"")
            task.done(b"", output)
            running.cancel()
        else:
            if when == "before its result":
                task.needs_memory(b"")
            running.cancel()
            await asyncio.sleep(0)
            assert lab.block_count >= 2, "the helper may use the memory"
            if when == "before its memory":
                with pytest.raises(RequestCancelled):
                    task.needs_memory(b"")
                output.release()
                task.failed(RequestCancelled())
            else:
                task.done(b"", output)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert lab.block_count == 0

    run(test)


def test_a_task_without_memory_of_the_server_gets_none() -> None:
    async def test(lab: Lab) -> None:
        task = AwaitedTask(lab.kernel, "n", b"", [])
        with pytest.raises(InternalError, match="task n needs no memory of the server"):
            task.needs_memory(b"")

    run(test)


class Sink:
    peer = ""

    def header(self, name: str) -> str:
        return ""

    def send(self, response: Response) -> None:
        response.release()
