"""A test that takes too long fails, on both loops, and those after it run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WAITING = """
import asyncio
import pytest
import uvloop

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.timeout(0.2)
def test_waits(loop):
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(asyncio.Event().wait())

def test_after_it():
    pass
"""


def test_a_test_that_waits_without_end_fails_on_both_loops(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.time_limit import pytest_timeout_set_timer\n")
    file = tmp_path / "test_waiting.py"
    file.write_text(WAITING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", str(file)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, timeout=60)
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "Timeout (>0.2s)" in done.stdout
