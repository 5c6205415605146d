"""Zygotes: what they import, how they end, and that a worker starts whatever becomes of them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from backends.launch import children, working, zygote_pool, zygote_process, zygote_start
from backends.launch.forking import ForkingLauncher
from backends.launch.spawning import SpawningLauncher
from backends.transport import zygote_messages as messages
from kernel.errors import InvalidArgument, Unavailable
from kernel.repository.worker_needs import PreloadSet, WorkerNeeds
from tests.backends.launch.started_workers import (
    end_of,
    hello_of,
    launch,
    run,
    stop,
    until,
    worker_processes,
)
from tests.child_processes import children_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.launch.worker_processes import WorkerProcesses


def zygotes() -> list[int]:
    """Return the process ids of the zygotes of this process."""
    return children_with("backends.zygote")


def command_line(pid: int) -> bytes:
    """Return the command line of a process; b"" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def is_forked(pid: int) -> bool:
    """Whether a worker that lives is a fork: those say their mark in the command line. The watcher names the option."""
    return re.search(rb"\0--mark=\d", command_line(pid)) is not None


def preloading(folder: Path, source: str = "", modules: Sequence[str] = ()) -> WorkerNeeds:
    """Return the needs of a model with this `preload.py`, or none, and these modules."""
    file = folder / "preload.py"
    if source:
        file.write_text(source)
    return WorkerNeeds("identity", PreloadSet(tuple(modules), str(file) if source else "", source))


async def zygote_of(processes: WorkerProcesses) -> int:
    """Return the process id of the zygote, which has forked something."""
    await stop(await launch(processes.launcher))
    [zygote] = zygotes()
    return zygote


def test_workers_are_forked_from_one_zygote() -> None:
    async def scenario() -> None:
        async with worker_processes("auto") as processes:
            workers = [await launch(processes.launcher, f"m_{number}") for number in range(3)]
            helper = await processes.helper_launcher.launch("helper", helper=True)
            for each in (*workers, helper):
                await hello_of(each)
            assert all(is_forked(each.pid) for each in workers)
            assert len(zygotes()) == 1
            for each in (*workers, helper):
                await stop(each)
        assert zygotes() == []

    run(scenario())


def test_instances_on_gpus_are_spawned_unless_all_must_be_forked() -> None:
    async def scenario() -> None:
        needs = WorkerNeeds("identity", gpu=True)
        for start, forked in (("auto", False), ("fork", True)):
            async with worker_processes(start) as processes:
                worker = await launch(processes.launcher, needs=needs)
                await hello_of(worker)
                assert is_forked(worker.pid) == forked
                await stop(worker)

    run(scenario())


def test_a_zygote_that_is_killed_takes_no_worker_with_it_and_is_replaced() -> None:
    async def scenario() -> None:
        async with worker_processes("fork") as processes:
            worker = await launch(processes.launcher)
            await hello_of(worker)
            [zygote] = zygotes()
            os.kill(zygote, signal.SIGKILL)
            await until(lambda: zygotes() not in ([zygote], []))
            second = await launch(processes.launcher, "m_1")
            await hello_of(second)
            assert is_forked(second.pid)
            assert psutil.Process(worker.pid).is_running()
            await stop(worker)
            await stop(second)

    run(scenario())


def test_a_worker_that_was_being_forked_is_forked_by_the_next_zygote() -> None:
    async def scenario() -> None:
        async with worker_processes("fork") as processes:
            zygote = await zygote_of(processes)
            os.kill(zygote, signal.SIGSTOP)
            starting = asyncio.ensure_future(launch(processes.launcher))
            await asyncio.sleep(0)  # it is sent in this iteration
            await asyncio.sleep(0)
            os.kill(zygote, signal.SIGKILL)
            worker = await starting
            await hello_of(worker)
            assert is_forked(worker.pid)
            await stop(worker)

    run(scenario())


def test_a_zygote_that_does_not_respond_is_killed_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zygote_start, "ZYGOTE_MODULE", "tests.backends.zygote.wrong_zygote")
    monkeypatch.setattr(zygote_process, "FORK_TIMEOUT_S", 0.01)
    monkeypatch.setenv("WRONG_RESPONSE", messages.encode(messages.Forked(99, 1)).hex())

    async def scenario() -> None:
        async with worker_processes("auto") as processes:
            launched = asyncio.ensure_future(launch(processes.launcher))
            await until(lambda: "it did not start a worker within 0.01 s" in caplog.text)
            monkeypatch.setattr(zygote_start, "ZYGOTE_MODULE", "backends.zygote")
            monkeypatch.setattr(zygote_process, "FORK_TIMEOUT_S", 30)
            worker = await launched
            await hello_of(worker)
            await stop(worker)

    run(scenario())


def test_a_zygote_that_a_signal_has_stopped_is_killed_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(working, "LOOK_S", 0.01)

    async def scenario() -> None:
        async with worker_processes("fork") as processes:
            os.kill(await zygote_of(processes), signal.SIGSTOP)
            worker = await launch(processes.launcher)
            assert "a zygote is killed: a signal (SIGSTOP) has stopped it" in caplog.text
            await hello_of(worker)
            await stop(worker)

    run(scenario())


@pytest.mark.parametrize("start", ["auto", "fork"])
def test_without_a_zygote_workers_are_spawned_unless_all_must_be_forked(
    start: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zygote_start, "ZYGOTE_MODULE", "no.such.module")

    async def scenario() -> None:
        async with worker_processes(start) as processes:
            assert isinstance(processes.launcher, ForkingLauncher)
            if start == "fork":
                with pytest.raises(Unavailable, match="could not be forked"):
                    await launch(processes.launcher)
                return
            worker = await launch(processes.launcher)
            await hello_of(worker)
            assert not is_forked(worker.pid)
            assert "is started without a fork" in caplog.text
            await stop(worker)

    run(scenario())


def test_a_backend_whose_import_leaves_threads_is_imported_after_the_fork(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zygote_start, "ZYGOTE_MODULE", "tests.backends.zygote.strange_zygote")

    async def scenario() -> None:
        async with worker_processes("fork") as processes:
            for _ in range(2):
                worker = await launch(processes.launcher, needs=WorkerNeeds("identity"))
                await hello_of(worker)
                assert is_forked(worker.pid)
                await stop(worker)
        assert caplog.text.count("backend 'identity' leaves 2 threads") == 1

    run(scenario())


# ---- preloading ------------------------------------------------------------------------------


def test_each_set_of_modules_has_a_zygote_until_its_workers_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_pool, "IDLE_S", 0.01)
    needs = preloading(tmp_path, "import os; os.environ['PRELOADED_BY'] = str(os.getpid())")

    async def scenario() -> None:
        async with worker_processes("fork") as processes:
            await zygote_of(processes)
            first = await launch(processes.launcher, "m_0", needs=needs)
            second = await launch(processes.launcher, "m_1", needs=needs)
            await hello_of(first)
            await hello_of(second)
            assert len(zygotes()) == 2
            await stop(first)
            assert len(zygotes()) == 2, "a worker of it lives"
            await stop(second)
            await until(lambda: len(zygotes()) == 1)

    run(scenario())


def test_the_zygote_that_was_not_used_for_the_longest_time_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_pool, "MAX_CHOSEN", 1)

    async def scenario() -> None:
        async with worker_processes("fork") as processes:
            first = await launch(processes.launcher, "m_0", needs=preloading(tmp_path, modules=["json"]))
            second = await launch(processes.launcher, "m_1", needs=preloading(tmp_path, modules=["csv"]))
            await until(lambda: len(zygotes()) == 2)
            third = await launch(processes.launcher, "m_2", needs=preloading(tmp_path, modules=["json"]))
            await until(lambda: len(zygotes()) == 2)
            for worker in (first, second, third):
                await hello_of(worker)
                await stop(worker)

    run(scenario())


@pytest.mark.parametrize(
    ("source", "modules", "text"),
    [
        ("", ["no_such_module_x"], "the preload failed: 'no_such_module_x' cannot be imported: ModuleNotFoundError: "),
        ("raise RuntimeError('no luck')", [], "the preload failed: preload.py failed: RuntimeError: no luck"),
        ("import os; os._exit(3)", [], "the preload failed: its process has ended (exit code 3)"),
        ("import sys; sys.exit(4)", [], "the preload failed: its process has ended (exit code 4)"),
    ],
)  # fmt: skip
def test_what_cannot_be_preloaded_fails_the_start_with_the_reason(
    tmp_path: Path, source: str, modules: list[str], text: str
) -> None:
    async def scenario() -> None:
        async with worker_processes("auto") as processes:
            await zygote_of(processes)
            with pytest.raises(InvalidArgument) as failure:
                await launch(processes.launcher, needs=preloading(tmp_path, source, modules))
            assert failure.value.message.startswith(text)
            await until(lambda: len(zygotes()) == 1)
            worker = await launch(processes.launcher)
            await hello_of(worker)
            await stop(worker)

    run(scenario())


#: Leaves a file with the process id of each process that runs it, and a thread.
LEAVES_A_THREAD = """
import os, pathlib, threading
pathlib.Path(__file__).with_name(str(os.getpid())).touch()
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""

#: Computes with a library that has a team of OpenMP threads, as a model does that is fitted at its import.
COMPUTES = """
import numpy
from sklearn.ensemble import HistGradientBoostingRegressor
HistGradientBoostingRegressor(max_iter=2).fit(numpy.arange(400.0).reshape(200, 2), numpy.arange(200.0))
"""


def test_after_a_preload_that_leaves_threads_workers_are_spawned_and_preload_themselves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs = preloading(tmp_path, LEAVES_A_THREAD, ["json"])

    async def scenario() -> None:
        async with worker_processes("auto") as processes:
            await zygote_of(processes)
            workers = [await launch(processes.launcher, f"m_{number}", needs=needs) for number in range(2)]
            for worker in workers:
                await hello_of(worker)
                assert not is_forked(worker.pid)
                assert (tmp_path / str(worker.pid)).exists(), "it has run the preload"
                await stop(worker)
            assert len(list(tmp_path.glob("[0-9]*"))) == 3, "the zygote has tried it once, and each worker"
            await until(lambda: len(zygotes()) == 1)
            await stop(await launch(processes.launcher))
        assert caplog.text.count("after 'json, preload.py' there are 2 threads (") == 1

    run(scenario())


def test_if_all_workers_must_be_forked_a_preload_that_leaves_threads_fails_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with worker_processes("fork") as processes:
            with pytest.raises(InvalidArgument, match="the preload failed: after 'preload.py' there are 2 threads"):
                await launch(processes.launcher, needs=preloading(tmp_path, LEAVES_A_THREAD))

    run(scenario())


def test_a_preload_that_has_computed_with_openmp_is_not_forked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    async def scenario() -> None:
        async with worker_processes("auto") as processes:
            worker = await launch(processes.launcher, needs=preloading(tmp_path, COMPUTES))
            await hello_of(worker)
            assert not is_forked(worker.pid)
            await stop(worker)
        assert "there are 2 threads" in caplog.text

    run(scenario())


def test_a_preload_that_fails_in_a_spawned_worker_ends_it_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "once").touch()
    source = f"{LEAVES_A_THREAD}\npathlib.Path(__file__).with_name('once').unlink()"

    async def scenario() -> None:
        async with worker_processes("auto") as processes:
            worker = await launch(processes.launcher, needs=preloading(tmp_path, source))
            assert await end_of(worker) == "exit code 1"
            worker.socket.close()
        assert "the preload failed: preload.py failed: FileNotFoundError" in caplog.text

    run(scenario())


def test_a_preload_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_process, "PRELOAD_TIMEOUT_S", 0.2)
    needs = preloading(tmp_path, "import signal; signal.pause()")

    async def scenario() -> None:
        async with worker_processes("auto") as processes:
            with pytest.raises(InvalidArgument, match=r"the preload was not done after 0 s"):
                await launch(processes.launcher, needs=needs)
            await until(lambda: len(zygotes()) == 1)

    run(scenario())


def test_a_start_that_is_cancelled_leaves_no_worker() -> None:
    async def scenario() -> None:
        async with worker_processes("fork") as processes:
            zygote = await zygote_of(processes)
            os.kill(zygote, signal.SIGSTOP)
            starting = asyncio.ensure_future(launch(processes.launcher))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            os.kill(zygote, signal.SIGCONT)
            await stop(await launch(processes.launcher))
            await until(lambda: not any(is_forked(child.pid) for child in psutil.Process().children()))

    run(scenario())


def test_a_zygote_holds_nothing_but_its_socket() -> None:
    async def scenario() -> None:
        async with worker_processes("fork") as processes:
            zygote = await zygote_of(processes)
            targets = [os.readlink(f"/proc/{zygote}/fd/{fd}") for fd in os.listdir(f"/proc/{zygote}/fd")]
            assert sorted(target.partition(":")[0] for target in targets) == ["/dev/null", "pipe", "pipe", "socket"]
            assert len(os.listdir(f"/proc/{zygote}/task")) == 1
            assert Path(f"/proc/{zygote}/comm").read_text() == "naiad-zygote\n"

    run(scenario())


@pytest.mark.parametrize("start", ["auto", "fork"])
def test_on_a_system_that_does_not_list_children_workers_are_spawned_unless_all_must_be_forked(
    start: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def not_listed() -> list[int]:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/self/task/1/children")

    monkeypatch.setattr(children, "child_numbers", not_listed)

    async def scenario() -> None:
        if start == "fork":
            with pytest.raises(FileNotFoundError):
                async with worker_processes(start):
                    pass
            return
        async with worker_processes(start) as processes:
            assert isinstance(processes.launcher, SpawningLauncher)
            assert "workers are started without forks" in caplog.text

    run(scenario())


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (b"garbage", "it has sent an invalid message"),
        (messages.encode(messages.Forked(1, 1)), "it says that it has forked process 1, which is no child of this one"),
    ],
)
def test_what_a_zygote_says_is_not_trusted(
    sent: bytes, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zygote_start, "ZYGOTE_MODULE", "tests.backends.zygote.wrong_zygote")
    monkeypatch.setenv("WRONG_RESPONSE", sent.hex())

    async def scenario() -> None:
        async with worker_processes("fork") as processes:
            with pytest.raises(Unavailable, match="could not be forked"):
                await launch(processes.launcher)

    run(scenario())
    assert problem in caplog.text
