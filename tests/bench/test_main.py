"""The command line of the measurements."""

from __future__ import annotations

import subprocess
import sys

from bench.__main__ import rows
from bench.light_rows import light_rows
from bench.rows import all_rows


def test_an_unknown_commit_is_refused_in_one_line_before_anything_is_measured() -> None:
    command = [sys.executable, "-m", "bench", "--against", "no-such-commit"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("cannot measure: git knows no commit 'no-such-commit'")
    assert "Traceback" not in done.stderr


def test_the_help_says_how_many_rows_there_are() -> None:
    assert (rows.__doc__ or "").startswith(f"Load in {len(all_rows()) + len(light_rows())} rows: ")
