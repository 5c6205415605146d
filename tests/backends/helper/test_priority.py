from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from backends.helper.priority import NICENESS

if TYPE_CHECKING:
    from pathlib import Path

LOWER = "import os, sys; from pathlib import Path; from backends.helper.priority import lower_priority; "


def run(program: str, *arguments: str) -> str:
    """Run a program in a session of its own; return what it prints."""
    command = [sys.executable, "-c", LOWER + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True).stdout


def test_a_helper_and_its_session_get_low_priority() -> None:
    printed = run(
        "lower_priority(); print(os.nice(0)); group = Path('/proc/self/autogroup'); "
        "print(group.read_text() if group.exists() else '')"
    )
    niceness, groups = printed.split("\n", 1)
    assert int(niceness) == NICENESS
    assert f"nice {NICENESS}" in groups or "autogroup" not in groups


def test_a_system_without_groups_of_sessions_is_no_error(tmp_path: Path) -> None:
    assert run("lower_priority(Path(sys.argv[1])); print(os.nice(0))", str(tmp_path / "none" / "autogroup")) == "10\n"


def test_a_group_that_was_changed_just_now_is_changed_a_little_later() -> None:
    program = """
class Busy:
    refusals = 1
    def write_text(self, text):
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError
        print(text)
lower_priority(Busy())
"""
    assert run("\n" + program) == f"{NICENESS}\n"


def test_a_group_that_stays_busy_is_left_as_it_is() -> None:
    program = """
class Busy:
    attempts = 0
    def write_text(self, text):
        self.attempts += 1
        raise BlockingIOError
busy = Busy()
lower_priority(busy)
print(busy.attempts)
"""
    assert run("\n" + program) == "3\n"
