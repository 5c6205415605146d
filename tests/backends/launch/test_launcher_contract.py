"""What every launcher of workers does: the same tests for that of this machine and for those of other hosts.

A launcher of another kind is added to `LAUNCHERS`.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backends.hosts.ray_launcher import RayLauncher
from backends.launch.launcher import Launcher, LauncherSet
from backends.launch.spawning import SpawningLauncher
from backends.transport import wire
from backends.transport.framing import frame
from kernel.errors import InvalidArgument
from kernel.repository.worker_needs import WorkerNeeds
from tests.backends.hosts.agent_lab import agent_running, launcher_to
from tests.backends.hosts.played_ray import played_ray
from tests.backends.launch.started_workers import end_of, hello_of, identity_model, run, worker_processes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager


@contextlib.asynccontextmanager
async def local(folder: Path) -> AsyncIterator[Launcher]:
    async with worker_processes("spawn") as processes:
        yield processes.launcher


@contextlib.asynccontextmanager
async def agent(folder: Path) -> AsyncIterator[Launcher]:
    async with agent_running(folder) as (_, address), launcher_to(address) as launcher:
        yield launcher


@contextlib.asynccontextmanager
async def with_played_ray(folder: Path) -> AsyncIterator[Launcher]:
    async with played_ray() as (launcher, _, _):
        yield launcher


@contextlib.asynccontextmanager
async def with_ray(folder: Path) -> AsyncIterator[Launcher]:
    launcher = RayLauncher(SpawningLauncher())
    await launcher.start()
    try:
        yield launcher
    finally:
        await launcher.close()


LAUNCHERS: dict[str, Callable[[Path], AbstractAsyncContextManager[Launcher]]] = {
    "local": local,
    "agent": agent,
    "played ray": with_played_ray,
    "ray": with_ray,
}

pytestmark = pytest.mark.parametrize("kind", LAUNCHERS)


@pytest.fixture(autouse=True)
def cluster(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster of launcher `ray`, which is started once for all tests. Skips without Ray: see `make test-ray`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of agents that are children of this process
    if kind == "ray":
        request.getfixturevalue("ray_address")


@pytest.fixture
def needs(tmp_path: Path) -> WorkerNeeds:
    return identity_model(tmp_path / "models")


def test_a_worker_is_started_and_ends_when_it_is_asked_to(kind: str, tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with LAUNCHERS[kind](tmp_path / "c") as launcher:
            worker = await launcher.launch("m_0", needs=needs)
            assert (await hello_of(worker)).protocol == wire.PROTOCOL
            assert bool(worker.host) == (kind != "local")
            assert Path(worker.folder(needs.folder), "1", "weights").read_bytes() == b"weights" * 1000
            worker.socket.setblocking(True)
            worker.socket.sendall(frame(wire.encoder.encode(wire.Stop())))
            ended = asyncio.create_task(end_of(worker))
            await worker.stop(30)
            assert (await ended).startswith("exit code 0")
            assert not worker.unreachable
            worker.socket.close()

    run(main())


def test_a_killed_worker_is_lost_with_its_cause(kind: str, tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with LAUNCHERS[kind](tmp_path / "c") as launcher:
            worker = await launcher.launch("m_0", needs=needs)
            await hello_of(worker)
            worker.kill()
            assert (await end_of(worker)).startswith("killed by signal 9 (SIGKILL)")
            worker.socket.close()

    run(main())


def test_a_terminated_worker_is_lost_with_its_cause(kind: str, tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with LAUNCHERS[kind](tmp_path / "c") as launcher:
            worker = await launcher.launch("m_0", needs=needs)
            await hello_of(worker)
            worker.terminate()
            assert (await end_of(worker)).startswith("killed by signal 15 (SIGTERM)")
            worker.socket.close()

    run(main())


def test_a_worker_that_does_not_end_is_killed(kind: str, tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with LAUNCHERS[kind](tmp_path / "c") as launcher:
            worker = await launcher.launch("m_0", needs=needs)
            await hello_of(worker)
            ended = asyncio.create_task(end_of(worker))
            await asyncio.sleep(0)
            await worker.stop(0.01)  # nobody has asked it to end
            assert (await ended).startswith("killed by signal 9 (SIGKILL)")
            worker.socket.close()

    run(main())


def test_several_workers_live_at_the_same_time(kind: str, tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with LAUNCHERS[kind](tmp_path / "c") as launcher:
            workers = await asyncio.gather(*(launcher.launch(f"m_{number}", needs=needs) for number in range(3)))
            assert len({(await hello_of(worker)).pid for worker in workers}) == 3
            for worker in workers:
                worker.kill()
                await end_of(worker)
                worker.socket.close()

    run(main())


def test_a_model_chooses_its_launcher_and_an_unknown_one_is_refused(
    kind: str, tmp_path: Path, needs: WorkerNeeds
) -> None:
    async def main() -> None:
        async with LAUNCHERS[kind](tmp_path / "c") as launcher, LAUNCHERS["local"](tmp_path / "d") as here:
            chosen = LauncherSet(here, {"tested": launcher})  # type: ignore[dict-item]
            wanted = WorkerNeeds("identity", folder=needs.folder, version=1, launcher="tested")
            worker = await chosen.launch("m_0", needs=wanted)
            assert bool(worker.host) == (kind != "local")
            worker.kill()
            await end_of(worker)
            worker.socket.close()
            with pytest.raises(InvalidArgument, match=r"no launcher 'other' .*has 'local', 'tested' \(--launcher\)"):
                await chosen.launch("m_0", needs=WorkerNeeds(launcher="other"))

    run(main())
