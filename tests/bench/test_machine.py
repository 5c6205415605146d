"""Whether a machine is busy is measured by its processors at that moment; memory is what the system counts."""

from __future__ import annotations

import os
import time

import msgspec
import pytest

from bench import machine
from bench.machine import ProcessMemory, memory_of, parse_rollup
from tests.bench.conftest import MACHINE


@pytest.mark.parametrize(("idle_seconds", "in_use"), [(2.0, 0.0), (2.01, 0.0), (0.5, 1.5), (0.0, 2.0)])
def test_processors_in_use_are_those_that_were_not_idle(
    idle_seconds: float, in_use: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([1000.0, 1000.0 + idle_seconds])
    monkeypatch.setattr(machine, "idle_seconds", lambda: next(seconds))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert machine.this_machine().load == in_use


def test_a_line_about_a_machine_mentions_load_only_if_it_was_busy() -> None:
    assert "busy" not in MACHINE.line
    assert msgspec.structs.replace(MACHINE, load=1.5).line.endswith("busy with other things (1.5 processors in use)")


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
