"""Workers of a kernel in this process, spawned and forked, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from backends.launch.local_process import LocalProcess
from backends.launch.output import OutputLimits
from backends.launch.worker_processes import WorkerProcesses
from backends.transport import wire
from backends.transport.framing import MAX_WORKER_FRAME, FrameReader
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from backends.launch.launcher import Launched, Launcher

#: How workers are started.
STARTS = ("fork", "spawn")


def run(scenario: Coroutine[None, None, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(50):
            await scenario

    asyncio.run(in_time())


@contextlib.asynccontextmanager
async def worker_processes(
    start: str, task_module: str = "tests.backends.helper.task_functions"
) -> AsyncIterator[WorkerProcesses]:
    """What the workers of a server share. This process is a subreaper until the end, if workers are forked.

    `task_module` is that of helpers.
    """
    processes = WorkerProcesses(
        start,
        shared_memory=True,
        output_limits=OutputLimits(),
        task_module=task_module,
    )
    try:
        yield processes
    finally:
        await processes.close()


def identity_model(models: Path, weights: bytes = b"weights" * 1000) -> WorkerNeeds:
    """Write a model with a file of weights into the folder `models`, and return what its worker needs."""
    folder = models / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "weights").write_bytes(weights)
    return WorkerNeeds("identity", folder=str(folder), version=1)


async def launch(launcher: Launcher, title: str = "m_0", needs: WorkerNeeds = NO_NEEDS) -> LocalProcess:
    """Start a worker."""
    launched = await launcher.launch(title, needs=needs)
    assert isinstance(launched, LocalProcess)
    return launched


async def hello_of(launched: Launched) -> wire.Hello:
    """Return the first message of a worker."""
    launched.socket.setblocking(False)
    reader = FrameReader(MAX_WORKER_FRAME)
    raw: list[bytes] = []
    while not raw:
        data = await asyncio.get_running_loop().sock_recv(launched.socket, 4096)
        assert data, "the worker has ended"
        raw = reader.feed(data)
    hello = wire.to_kernel_decoder.decode(raw[0])
    assert isinstance(hello, wire.Hello)
    return hello


async def end_of(launched: Launched) -> str:
    """Wait for the end of a process; returns its cause."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    launched.on_lost(ended.set_result)
    return await ended


async def stop(launched: Launched) -> None:
    """Kill a worker and wait for its end."""
    launched.kill()
    await end_of(launched)
    launched.socket.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition()` is true: the system says nothing of it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
