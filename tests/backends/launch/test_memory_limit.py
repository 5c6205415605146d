"""Limits of the memory of workers: figures, and what is done where the server may make no cgroup."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from backends.launch import memory_limit
from backends.launch.memory_limit import Cgroup, exceeded, limit_memory, own_cgroup

if TYPE_CHECKING:
    from pathlib import Path

#: Takes 200 MiB after a line on its standard input.
TAKES_MEMORY = """
import sys
sys.stdin.readline()
taken = bytearray(200 << 20)
sys.stdin.readline()
"""


def test_the_text_has_both_figures() -> None:
    text = exceeded(300 << 20, 128 << 20)
    assert text == "it used 300 MiB of memory, and its model may use 128 MiB (naiad.memory_limit)"


def limited(monkeypatch: pytest.MonkeyPatch, parent: Path | None) -> tuple[str, int]:
    """Run a process that takes too much memory; returns the explanation and its exit code."""
    monkeypatch.setattr(memory_limit, "own_cgroup", lambda: parent)

    process = subprocess.Popen([sys.executable, "-c", TAKES_MEMORY], stdin=subprocess.PIPE)

    async def main() -> tuple[str, int]:
        limit = limit_memory(process.pid, 100 << 20, process.kill)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        code = await asyncio.to_thread(process.wait)
        process.stdin.close()
        explanation = limit.explanation()
        limit.close()
        return explanation, code

    return asyncio.run(main())


def test_without_a_cgroup_a_process_above_its_limit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    explanation, code = limited(monkeypatch, None)
    assert code == -9
    assert "MiB of memory, and its model may use 100 MiB" in explanation


def may_limit(parent: Path) -> bool:
    """Whether processes can be put into a cgroup of their own in `parent`, with a limit of memory."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    cgroup = memory_limit.make_cgroup(parent, process.pid, 1 << 40)
    process.communicate()
    if cgroup is None:
        return False
    cgroup.close()
    return True


def test_in_a_cgroup_the_system_kills_a_process_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = own_cgroup()
    if parent is None or not may_limit(parent):
        pytest.skip("this process may make no cgroup with a limit of memory")
    explanation, code = limited(monkeypatch, parent)
    assert code == -9
    assert "its model may use 100 MiB" in explanation


def test_a_cgroup_explains_only_what_it_has_ended(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 0\noom_kill 0\n")
    cgroup = Cgroup(tmp_path, 100 << 20)
    assert cgroup.explanation() == ""
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\n")
    (tmp_path / "memory.peak").write_text(f"{101 << 20}\n")
    assert cgroup.explanation() == exceeded(101 << 20, 100 << 20)


def test_a_folder_that_is_no_cgroup_with_memory_is_not_used(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert memory_limit.make_cgroup(missing, os.getpid(), 1 << 20) is None
