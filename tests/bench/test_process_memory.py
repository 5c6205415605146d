"""The memory of a process is read from the system's counts."""

from __future__ import annotations

import os

from bench.process_memory import ProcessMemory, memory_of, parse_rollup

ROLLUP = """\
55b0a000-7ffd5000 ---p 00000000 00:00 0                                  [rollup]
Rss:               40000 kB
Pss:               30000 kB
Pss_Dirty:         20000 kB
Shared_Clean:       5000 kB
Private_Clean:      1000 kB
Private_Dirty:     22000 kB
Private_Hugetlb:       0 kB
"""


def test_private_memory_is_the_sum_of_its_kinds() -> None:
    assert parse_rollup(ROLLUP) == ProcessMemory(40000 << 10, 30000 << 10, 23000 << 10)


def test_memories_are_added_part_by_part() -> None:
    assert ProcessMemory(1, 2, 3) + ProcessMemory(10, 20, 30) == ProcessMemory(11, 22, 33)


def test_a_process_that_has_ended_has_no_memory() -> None:
    assert parse_rollup("") == ProcessMemory()


def test_a_running_process_has_memory_and_shares_some() -> None:
    found = memory_of(os.getpid())
    assert found.resident >= found.proportional >= found.private > 1 << 20
