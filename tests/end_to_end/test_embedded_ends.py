"""Servers within a program that end without being asked to: forgotten, or with their program."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from bench.server import wait_for
from kernel.embedding import EmbeddedServer
from tests.child_processes import children_with

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]

SQUARE = """
backend: "square"
model_transaction_policy { decoupled: true }
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    (folder / "square_int32" / "1").mkdir(parents=True)
    (folder / "square_int32" / "config.pbtxt").write_text(SQUARE)
    return folder


def workers() -> list[int]:
    """Return the process ids of workers of this process."""
    return children_with("backends.worker")


def test_a_server_that_is_forgotten_ends(models: Path) -> None:
    before = set(workers())
    server = EmbeddedServer(models).start()
    assert set(workers()) - before
    del server
    gc.collect()
    assert set(workers()) <= before


PROGRAM = """
from kernel.embedding import EmbeddedServer
server = EmbeddedServer({models!r}).start()
print(server.infer("model", {{"IN": [1]}})["OUT"][0], flush=True)
{ending}
"""


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_program_that_ends_ends_its_server(
    write_model: Callable[[str, str, str], Path], tmp_path: Path, ending: str
) -> None:
    models = write_model(
        "model",
        """input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
        output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]""",
        """
        import os
        from pathlib import Path

        class TritonPythonModel:
            def execute(self, requests):
                pid = np.array([os.getpid()], np.int32)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pid)]) for request in requests]

            def finalize(self):
                Path(pb_utils.get_model_dir(), "finalized").touch()
        """,
    )
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(models=str(models), ending=ending))
    done = run(program)
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[ending], done.stderr
    assert done.stderr == "" or ending == "1 / 0"
    assert (models / "model" / "1" / "finalized").exists()
    assert not psutil.pid_exists(int(done.stdout))


def test_workers_do_not_outlive_a_program_that_is_killed(models: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import os, psutil, signal
        from kernel.embedding import EmbeddedServer
        server = EmbeddedServer({str(models)!r}).start()
        print(psutil.Process().children()[0].pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    done = run(program)
    assert done.returncode == -9
    wait_for(lambda: not psutil.pid_exists(int(done.stdout)))


def run(program: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
