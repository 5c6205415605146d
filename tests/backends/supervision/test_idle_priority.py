"""The lowest priority of workers, and the way back."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from backends.supervision.idle_priority import IdlePriority, regains_priority
from tests.kernel.traffic.traffic_lab import TrafficLab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Two threads that wait until the process is ended.
_PROGRAM = """
import sys, threading
thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker() -> Iterator[int]:
    """A process with a session of its own."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, start_new_session=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


@pytest.fixture
def lab(worker: int) -> TrafficLab:
    lab = TrafficLab()
    lab.models[4].statistics.memory.worker_started("m_4", worker)
    return lab


def policies(pid: int) -> set[int]:
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}


def test_all_threads_wait_for_others_and_get_their_policy_back(lab: TrafficLab, worker: int) -> None:
    if not regains_priority():
        pytest.skip("this process may not leave SCHED_IDLE")
    system = IdlePriority(lab.catalog)
    assert system.restore(lab.models[4]), "nothing was lowered"
    while not system.lower(lab.models[4]):
        pass
    assert policies(worker) == {os.SCHED_IDLE}
    while not system.restore(lab.models[4]):
        pass
    assert policies(worker) == {os.SCHED_OTHER}


def files_of(folder: Path, pid: int, text: str = "/autogroup-7 nice 0\n") -> Path:
    """Make the file of the group of a process in a folder that stands for /proc."""
    made = folder / str(pid)
    made.mkdir()
    (made / "autogroup").write_text(text)
    return made / "autogroup"


def test_the_group_of_a_session_gets_the_lowest_nice_value_and_its_own_again(
    lab: TrafficLab, worker: int, tmp_path: Path
) -> None:
    group = files_of(tmp_path, worker, "/autogroup-7 nice 5\n")
    system = IdlePriority(lab.catalog, tmp_path, lambda: False)
    assert system.lower(lab.models[4])
    assert group.read_text() == "19"
    assert policies(worker) == {os.SCHED_OTHER}, "no thread would get back"
    assert system.restore(lab.models[4])
    assert group.read_text() == "5"
    group.write_text("untouched")
    assert system.restore(lab.models[4])
    assert group.read_text() == "untouched"


def test_processes_that_other_versions_share_and_those_without_a_session_of_their_own_keep_their_priority(
    lab: TrafficLab, worker: int, tmp_path: Path
) -> None:
    own, shared = files_of(tmp_path, os.getpid()), files_of(tmp_path, worker)
    lab.models[3].statistics.memory.worker_started("m_3", worker)
    lab.models[4].statistics.memory.worker_started("m_4_1", os.getpid())
    system = IdlePriority(lab.catalog, tmp_path, lambda: False)
    assert system.lower(lab.models[4])
    assert shared.read_text() == "/autogroup-7 nice 0\n"
    if os.getsid(0) != os.getpid():
        assert own.read_text() == "/autogroup-7 nice 0\n"


def test_a_system_without_such_groups_and_a_worker_that_has_ended_are_no_errors(
    lab: TrafficLab, worker: int, tmp_path: Path
) -> None:
    system = IdlePriority(lab.catalog, tmp_path, lambda: True)
    assert system.lower(lab.models[4])
    assert system.restore(lab.models[4])
    lab.models[4].statistics.memory.worker_started("m_4", 1 << 22)  # no process can have this id
    assert system.lower(lab.models[4])
    assert system.restore(lab.models[4])
