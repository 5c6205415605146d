"""What of the machine this process may use.

How many file descriptors there may be, and which of them clients may not keep.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kernel import machine
from kernel.machine import is_reserved, private_byte_size, raise_descriptor_limit, reserved_count

if TYPE_CHECKING:
    from pathlib import Path


#: The bytes of memory of the machine of these tests.
MEMORY = 8 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of control groups on a machine with eight processors; this process is in group a/b."""
    (tmp_path / "fs/a/b").mkdir(parents=True)
    (tmp_path / "own").write_text("12:cpu:/elsewhere\n0::/a/b\n")
    monkeypatch.setattr(machine, "GROUPS_FOLDER", tmp_path / "fs")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": MEMORY // 4096}.__getitem__)
    return tmp_path / "fs"


def test_without_a_quota_the_affinity_counts(groups: Path) -> None:
    assert machine.processor_count() == 8
    (groups / "a/b/cpu.max").write_text("max 100000\n")
    assert machine.processor_count() == 8


def test_the_smallest_quota_of_all_groups_above_counts(groups: Path) -> None:
    (groups / "a/b/cpu.max").write_text("600000 100000\n")
    assert machine.processor_count() == 6
    (groups / "a/cpu.max").write_text("250000 100000\n")
    assert machine.processor_count() == 2
    (groups / "cpu.max").write_text("900000 100000\n")
    assert machine.processor_count() == 2


def test_there_is_always_one_processor(groups: Path) -> None:
    (groups / "a/b/cpu.max").write_text("20000 100000\n")
    assert machine.processor_count() == 1


@pytest.mark.parametrize("text", ["", "max", "no numbers", "1 0"])
def test_an_unreadable_quota_is_no_quota(groups: Path, text: str) -> None:
    (groups / "a/b/cpu.max").write_text(text)
    assert machine.processor_count() == 8


def test_a_machine_without_control_groups_has_no_quota(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "OWN_GROUPS", groups / "none")
    assert machine.processor_count() == 8


def test_without_a_limit_the_machines_memory_counts(groups: Path) -> None:
    (groups / "a/b/memory.max").write_text("max\n")
    assert machine.memory_byte_size() == MEMORY


def test_the_smallest_memory_limit_of_all_groups_above_counts(groups: Path) -> None:
    (groups / "a/b/memory.max").write_text(f"{2 * MEMORY}\n")
    assert machine.memory_byte_size() == MEMORY
    (groups / "a/memory.max").write_text(f"{MEMORY // 4}\n")
    assert machine.memory_byte_size() == MEMORY // 4


def test_available_memory_is_what_the_machine_and_all_groups_above_have_left(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = groups.parent / "meminfo"
    monkeypatch.setattr(machine, "MEMORY_FILES", known)
    assert machine.available_memory_byte_size() == MEMORY, "without any figures"
    known.write_text("MemTotal:       8388608 kB\nMemAvailable:    4194304 kB\n")
    assert machine.available_memory_byte_size() == 4 << 30
    (groups / "a/memory.max").write_text(f"{3 << 30}\n")
    assert machine.available_memory_byte_size() == 3 << 30, "no more than the limit"
    (groups / "a/memory.current").write_text(f"{2 << 30}\n")
    (groups / "a/memory.stat").write_text(f"anon 5\ninactive_file {1 << 29}\n")
    assert machine.available_memory_byte_size() == (1 << 30) + (1 << 29)
    (groups / "a/memory.current").write_text(f"{9 << 30}\n")
    assert machine.available_memory_byte_size() == 0


def test_threads_share_one_heap() -> None:
    program = (
        "import ctypes, threading\n"
        "from kernel.machine import share_malloc_arena\n"
        "share_malloc_arena()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "kept = []\n"
        "thread = threading.Thread(target=lambda: kept.append(libc.malloc(ctypes.c_size_t(1000))))\n"
        "thread.start(); thread.join()\n"
        "heap = next(line for line in open('/proc/self/maps') if line.endswith('[heap]\\n')).split()[0]\n"
        "first, last = (int(each, 16) for each in heap.split('-'))\n"
        "print(first <= kept[0] < last)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not GNU's")
def test_blocks_of_tensors_find_their_memory_again() -> None:
    program = (
        "import resource\n"
        "from kernel.machine import keep_freed_memory\n"
        "keep_freed_memory()\n"
        "faults = []\n"
        "for _ in range(21):\n"
        "    blocks = [bytearray(1 << 20) for _ in range(4)]; del blocks\n"
        "    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)\n"
        "print(faults[-1] - faults[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000, "each of the 80 blocks has 256 pages"


def test_kills_for_lack_of_memory_are_those_of_the_own_group_or_of_the_machine(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "MACHINE_EVENTS", groups / "vmstat")
    assert machine.memory_kill_count() == 0
    (groups / "vmstat").write_text("pgfault 12\noom_kill 3\n")
    assert machine.memory_kill_count() == 3
    (groups / "a/memory.events").write_text("oom 9\noom_kill 9\n")
    (groups / "a/b/memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert machine.memory_kill_count() == 1


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the soft and the hard limit, which functions here see and change in place of the real ones."""
    found = [256, 256]

    def change(number: int, wanted: tuple[int, int]) -> None:
        found[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda number: tuple(found))
    monkeypatch.setattr(resource, "setrlimit", change)
    return found


@pytest.mark.parametrize(("limit", "kept"), [(20, 10), (128, 64), (256, 64), (1024, 128), (4096, 512), (1 << 20, 1024)])
def test_some_descriptors_are_kept_from_clients(limits: list[int], limit: int, kept: int) -> None:
    assert reserved_count(limit) == kept
    limits[:] = limit, limit
    assert [is_reserved(fd) for fd in (0, limit - kept - 1, limit - kept, limit - 1)] == [False, False, True, True]


def test_without_a_limit_none_is_kept(limits: list[int]) -> None:
    limits[:] = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    assert not is_reserved(10**9)
    raise_descriptor_limit()
    assert limits == [resource.RLIM_INFINITY] * 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 30), (1 << 20, 1 << 30)),
        ((1024, resource.RLIM_INFINITY), (1 << 20, resource.RLIM_INFINITY)),
        ((1 << 21, 1 << 22), (1 << 21, 1 << 22)),
    ],
)
def test_the_limit_is_raised_and_never_lowered(
    limits: list[int], before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits[:] = before
    raise_descriptor_limit()
    assert tuple(limits) == after


def test_a_system_that_refuses_the_limit_does_not_end_the_start(
    limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits[:] = 1024, 4096

    def refuse(number: int, wanted: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_descriptor_limit()
    assert limits == [1024, 4096]


def test_memory_of_files_and_shared_memory_is_not_private() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    assert private_byte_size("9999 300 120 1 0 500 0\n") == 180 * page
    assert private_byte_size("900 100 300 1 0 200 0") == 0
    assert private_byte_size("") == 0, "the process has ended"
