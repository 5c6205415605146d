"""The helper process: it reads and writes regions of clients for the kernel, and another takes its place."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import TYPE_CHECKING

import pytest

from backends.helper import process
from backends.helper.process import Helper
from backends.launch.launcher import Pending, not_shown
from backends.launch.local_process import LocalProcess
from backends.launch.spawning import SpawningLauncher
from kernel.errors import InvalidArgument, Unavailable
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds
from shm.region import FileHandle, Region, RegionKind
from shm.tensor import Span

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SIZE = 1 << 20


class RecordingLauncher(SpawningLauncher):
    def __init__(self) -> None:
        super().__init__()
        self.started: list[LocalProcess] = []

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> LocalProcess:
        process = await super().launch(title, helper=helper)
        assert isinstance(process, LocalProcess)
        self.started.append(process)
        return process


class Lab:
    def __init__(self) -> None:
        self.fd = os.memfd_create("client")
        os.ftruncate(self.fd, SIZE)
        self.region = Region("r", RegionKind.SYSTEM, FileHandle(self.fd), SIZE)
        self.launcher = RecordingLauncher()
        self.helper = Helper(self.launcher, 1 << 22)

    def span(self, offset: int, byte_size: int) -> Span:
        return Span(self.region.lease(), offset, byte_size)


def run(scenario: Callable[[Lab], Awaitable[None]]) -> None:
    async def main() -> None:
        lab = Lab()
        async with asyncio.timeout(50):
            try:
                await scenario(lab)
            finally:
                await lab.helper.close()
        for started in lab.launcher.started:
            with pytest.raises(ProcessLookupError):
                os.kill(started.pid, 0)

    asyncio.run(main())


def test_what_is_written_can_be_read() -> None:
    async def scenario(lab: Lab) -> None:
        assert lab.launcher.started == [], "it is started when it is first needed"
        await lab.helper.write(b"z" * 70_000, lab.span(100, 80_000))
        assert os.pread(lab.fd, 70_002, 99) == b"\0" + b"z" * 70_000 + b"\0"
        copy = await lab.helper.read(lab.span(90, 20))
        assert bytes(copy.lease.region.view(copy.offset, copy.byte_size)) == bytes(10) + b"z" * 10
        copy.lease.release()
        await lab.helper.write(b"", lab.span(0, 10))
        assert len(lab.launcher.started) == 1

    run(scenario)


def test_a_region_that_its_owner_shortens_is_an_error_and_the_helper_goes_on() -> None:
    async def scenario(lab: Lab) -> None:
        span = lab.span(0, SIZE)
        os.ftruncate(lab.fd, 10)
        with pytest.raises(InvalidArgument, match="truncated by its owner"):
            await lab.helper.read(span)
        with pytest.raises(InvalidArgument, match="truncated by its owner"):
            await lab.helper.write(b"abcd", lab.span(64, 4))
        os.ftruncate(lab.fd, SIZE)
        (await lab.helper.read(span)).lease.release()
        assert len(lab.launcher.started) == 1

    run(scenario)


def test_a_helper_that_dies_fails_what_it_was_asked_and_the_next_use_starts_another() -> None:
    async def scenario(lab: Lab) -> None:
        (await lab.helper.read(lab.span(0, 8))).lease.release()
        os.kill(lab.launcher.started[0].pid, signal.SIGSTOP)
        pending = asyncio.ensure_future(lab.helper.read(lab.span(0, 8)))
        await asyncio.sleep(0)
        os.kill(lab.launcher.started[0].pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="the helper process was lost"):
            await pending
        (await lab.helper.read(lab.span(0, 8))).lease.release()
        assert len(lab.launcher.started) == 2

    run(scenario)


def test_a_helper_that_a_signal_has_stopped_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.01)

    async def scenario(lab: Lab) -> None:
        (await lab.helper.read(lab.span(0, 8))).lease.release()
        os.kill(lab.launcher.started[0].pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="not read or written: the helper process was stopped by a signal"):
            await lab.helper.read(lab.span(0, 8))
        assert "helper was stopped by a signal (SIGSTOP) in a task and is killed" in caplog.text
        gc.collect()
        assert "never retrieved" not in caplog.text
        (await lab.helper.read(lab.span(0, 8))).lease.release()
        assert len(lab.launcher.started) == 2

    run(scenario)
