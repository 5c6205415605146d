"""The command line of the measurements."""

from __future__ import annotations

import subprocess
import sys


def test_an_unknown_commit_is_refused_in_one_line_before_anything_is_measured() -> None:
    command = [sys.executable, "-m", "bench", "--against", "no-such-commit"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("cannot measure: git knows no commit 'no-such-commit'")
    assert "Traceback" not in done.stderr
