"""Workers in environments of their models: prepared once, kept while they are used, given up at a limit."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import sys
import tarfile
from typing import TYPE_CHECKING

import pytest

from backends.launch.spawning import ModelEnvironments, SpawningLauncher
from backends.transport import wire
from kernel.errors import InternalError
from kernel.repository.execution_environment import EnvironmentSettings, ExecutionEnvironment
from kernel.repository.worker_needs import WorkerNeeds
from tests.backends.launch.started_workers import hello_of, launch, run, until

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = f'#!/bin/sh\nexec {sys.executable} "$@"\n'


def launcher(tmp_path: Path, timeout_s: float = 50) -> SpawningLauncher:
    settings = EnvironmentSettings(str(tmp_path / "cache"), timeout_s=timeout_s)
    return SpawningLauncher(environments=ModelEnvironments(settings))


def write_environment(folder: Path, program: str = PROGRAM) -> WorkerNeeds:
    """Write an environment whose interpreter is that of the tests."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "python").write_text(program)
    (folder / "bin" / "python").chmod(0o755)
    return WorkerNeeds(environment=ExecutionEnvironment(path=str(folder)))


def write_archive(path: Path) -> WorkerNeeds:
    with tarfile.open(path, "w:gz") as opened:
        member = tarfile.TarInfo("bin/python")
        member.size, member.mode = len(PROGRAM), 0o755
        opened.addfile(member, io.BytesIO(PROGRAM.encode()))
    return WorkerNeeds(environment=ExecutionEnvironment(path=str(path)))


async def started(own: SpawningLauncher, needs: WorkerNeeds) -> None:
    """Start a worker, wait for its first message, and end it."""
    launched = await launch(own, needs=needs)
    assert isinstance(await hello_of(launched), wire.Hello)
    launched.socket.close()
    await launched.stop(10)


def preparations(caplog: pytest.LogCaptureFixture) -> int:
    return sum("has Python" in line for line in caplog.messages)


def test_an_environment_is_prepared_once_for_several_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        own, needs = launcher(tmp_path), write_environment(tmp_path / "env")
        await asyncio.gather(*(started(own, needs) for _ in range(3)))
        assert preparations(caplog) == 1
        write_environment(tmp_path / "env", PROGRAM + "# changed\n")
        await started(own, needs)
        assert preparations(caplog) == 2

    caplog.set_level("INFO")
    run(scenario())


def test_an_environment_of_the_cache_is_locked_while_a_worker_runs_in_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        own, needs = launcher(tmp_path), write_archive(tmp_path / "env.tar.gz")
        launched = await launch(own, needs=needs)
        await hello_of(launched)
        [lock] = (tmp_path / "cache").glob("archive-*.lock")
        with lock.open() as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            launched.socket.close()
            await launched.stop(10)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    run(scenario())


def test_one_that_another_server_has_removed_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        own, needs = launcher(tmp_path), write_archive(tmp_path / "env.tar.gz")
        await started(own, needs)
        [marker] = (tmp_path / "cache").glob("archive-*/naiad-environment.json")
        marker.unlink()
        await started(own, needs)
        assert marker.exists()
        assert preparations(caplog) == 2

    caplog.set_level("INFO")
    run(scenario())


def test_what_cannot_be_prepared_is_an_error_with_the_reason_and_is_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        own, needs = launcher(tmp_path), WorkerNeeds(environment=ExecutionEnvironment(path=str(tmp_path / "env")))
        with pytest.raises(InternalError, match=f"the environment '{tmp_path}/env' does not exist"):
            await own.launch("m_0", needs=needs)
        write_environment(tmp_path / "env")
        await started(own, needs)

    run(scenario())


def test_a_preparation_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        own = launcher(tmp_path, timeout_s=1)
        needs = write_environment(tmp_path / "env", "#!/bin/sh\nexec sleep 100\n")
        with pytest.raises(InternalError, match="was not ready within 1 s"):
            await own.launch("m_0", needs=needs)

    run(scenario())


def test_a_preparation_that_ends_without_a_response_is_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        own = launcher(tmp_path)
        needs = write_environment(tmp_path / "env", "#!/bin/sh\nkill -9 $PPID\n")
        with pytest.raises(InternalError, match="has ended; the log has the reason"):
            await own.launch("m_0", needs=needs)

    run(scenario())


def test_a_load_that_is_cancelled_ends_its_preparation(tmp_path: Path) -> None:
    async def scenario() -> None:
        own = launcher(tmp_path)
        mark = tmp_path / "runs"
        needs = write_environment(tmp_path / "env", f"#!/bin/sh\necho $PPID > {mark}\nexec sleep 100\n")
        loading = asyncio.create_task(own.launch("m_0", needs=needs))
        await until(lambda: mark.exists() and bool(mark.read_text()))
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        process = f"/proc/{mark.read_text().strip()}"
        await until(lambda: not os.path.exists(process))

    run(scenario())
