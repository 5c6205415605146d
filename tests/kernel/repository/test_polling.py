"""Files that would block their reader are refused, and a file system that hangs holds neither others nor the end.

Models that failed to load are tried again when their files change, and after growing pauses.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from kernel import file_threads
from kernel.repository import polling, repositories
from kernel.repository.layout import Entry, ModelFolder
from kernel.repository.polling import MAX_PAUSE_NS, FailedLoads
from kernel.repository.settings import LifecycleSettings
from schedulers.direct import direct
from tests.kernel.repository_lab import CONFIG, RepositoryLab, run, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WARMUP = """
model_warmup [{ name: "w" batch_size: 1 inputs { key: "IN" value {
    data_type: TYPE_FP32 dims: [1] input_data_file: "data" } } }]
"""

LABELS = CONFIG.replace('name: "OUT"', 'name: "OUT" label_filename: "labels"')


def states(lab: RepositoryLab) -> dict[str, str]:
    return {item.name: item.state for item in lab.catalog.index()}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def of_proc(path: Path) -> None:
    path.symlink_to("/proc/kmsg")


@pytest.mark.parametrize("make", [fifo, device, of_proc])
@pytest.mark.parametrize(
    ("name", "config"), [("config.pbtxt", CONFIG), ("warmup/data", CONFIG + WARMUP), ("labels", LABELS)]
)
def test_a_file_that_blocks_fails_its_model_only(
    tmp_path: Path, name: str, config: str, make: Callable[[Path], None]
) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    lab.write("bad", config=config)
    (tmp_path / "bad" / "warmup").mkdir()
    (tmp_path / "bad" / name).unlink(missing_ok=True)
    make(tmp_path / "bad" / name)
    lab.write("good")

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start() == ["bad"]
        assert states(lab)["good"] == "READY"
        await lab.lifecycle.polling.once()

    run(lab, scenario)


def test_a_poll_that_waits_for_a_file_system_names_the_path_and_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_threads, "WAITING_S", 0.001)
    monkeypatch.setattr(polling, "REPORT_S", 0.01)
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), poll_s=0.001))
    lab.write("m")
    hung, end = str(tmp_path / "m" / "config.pbtxt"), threading.Event()
    stat = os.stat

    def hanging(path: str, **more: bool) -> os.stat_result:
        if path == hung:
            end.wait(60)
        return stat(path, **more)

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        monkeypatch.setattr(os, "stat", hanging)
        trouble = f"it waits for the file system at '{hung}'"
        await until(lambda: trouble in lab.lifecycle.polling.trouble())
        await until(lambda: trouble in caplog.text)
        end.set()
        await until(lambda: lab.lifecycle.polling.trouble() == "")

    run(lab, scenario)


def test_a_repository_whose_file_system_hangs_does_not_delay_polls_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_threads, "WAITING_S", 0.001)
    monkeypatch.setattr(polling, "REPORT_S", 0.01)
    monkeypatch.setattr(repositories, "LISTING_WAIT_S", 0.001)
    roots = [tmp_path / "hung", tmp_path / "other"]
    labs = [RepositoryLab(root, direct, LifecycleSettings(tuple(roots), poll_s=0.001)) for root in roots]
    labs[0].write("first")
    labs[1].write("second")
    hung, end = str(roots[0] / "first" / "config.pbtxt"), threading.Event()
    stat = os.stat

    def hanging(path: str, **more: bool) -> os.stat_result:
        if path == hung:
            end.wait(60)
        return stat(path, **more)

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        monkeypatch.setattr(os, "stat", hanging)
        trouble = f"it waits for the file system at '{hung}'"
        await until(lambda: trouble in lab.lifecycle.polling.trouble())
        labs[0].write("new_in_hung")
        labs[1].write("new_in_other")
        await until(lambda: states(lab).get("new_in_other") == "READY")
        shutil.rmtree(roots[1] / "second")
        await until(lambda: states(lab).get("second") != "READY")
        assert states(lab)["first"] == "READY"
        assert "new_in_hung" not in states(lab)
        await until(lambda: caplog.text.count(trouble) >= 2)
        assert trouble in lab.lifecycle.polling.trouble()
        end.set()
        await until(lambda: states(lab).get("new_in_hung") == "READY")
        await until(lambda: lab.lifecycle.polling.trouble() == "")

    run(labs[0], scenario)


def test_a_repository_that_is_gone_keeps_its_models_and_does_not_end_polls_of_the_others(tmp_path: Path) -> None:
    roots = [tmp_path / "gone", tmp_path / "other"]
    labs = [RepositoryLab(root, direct, LifecycleSettings(tuple(roots))) for root in roots]
    labs[0].write("first")
    labs[1].write("second")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        roots[0].rename(tmp_path / "away")
        labs[1].write("third")
        await lab.lifecycle.polling.once()
        assert {name: states(lab)[name] for name in ("first", "second", "third")} == dict.fromkeys(
            ("first", "second", "third"), "READY"
        )
        assert f"failed to read model repository '{roots[0]}'" in lab.lifecycle.polling.trouble()
        (tmp_path / "away").rename(roots[0])
        await lab.lifecycle.polling.once()
        assert lab.lifecycle.polling.trouble() == ""

    run(labs[0], scenario)


def test_the_end_of_the_server_does_not_wait_for_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    lab.write("m")
    hung, begun, end = str(tmp_path / "m" / "config.pbtxt"), threading.Event(), threading.Event()
    stat = os.stat

    def hanging(path: str, **more: bool) -> os.stat_result:
        if path == hung:
            begun.set()
            end.wait(60)
        return stat(path, **more)

    async def scenario(lab: RepositoryLab) -> None:
        monkeypatch.setattr(os, "stat", hanging)
        starting = asyncio.ensure_future(lab.lifecycle.start())
        await asyncio.to_thread(begun.wait)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(lab, scenario)
    assert not end.is_set()
    end.set()


POLL_NS = 10_000_000_000


def folder(name: str = "m", version: int = 1) -> ModelFolder:
    entry = Entry("m", is_folder=True)
    return ModelFolder(name, "/r/m", entry, {version: entry})


def polls_that_try(loads: FailedLoads, count: int) -> list[int]:
    """Let each load fail, and return at which polls there is one; a poll comes 10 ms late."""
    found = []
    for number in range(count):
        now_ns = number * (POLL_NS + 10_000_000)
        if loads.is_due(folder(), now_ns):
            found.append(number)
            loads.ended(folder(), now_ns + 1_000_000, failed=True)
    return found


def test_the_pauses_double_up_to_a_limit() -> None:
    tried = polls_that_try(FailedLoads(POLL_NS), 200)
    assert tried[:6] == [0, 1, 3, 7, 15, 31]
    longest = MAX_PAUSE_NS // POLL_NS
    assert {later - earlier for earlier, later in pairwise(tried[6:])} == {longest}


def test_changed_files_are_tried_at_once_and_begin_with_the_first_pause() -> None:
    loads = FailedLoads(POLL_NS)
    polls_that_try(loads, 20)
    changed = folder(version=2)
    assert loads.is_due(changed, 0)
    loads.ended(changed, 0, failed=True)
    assert not loads.is_due(changed, POLL_NS // 4)
    assert loads.is_due(changed, POLL_NS)


def test_a_model_that_was_loaded_or_never_failed_is_always_due() -> None:
    loads = FailedLoads(POLL_NS)
    loads.ended(folder(), 0, failed=True)
    assert loads.is_due(folder("other"), 0)
    loads.ended(folder(), 0, failed=False)
    assert loads.is_due(folder(), 0)
