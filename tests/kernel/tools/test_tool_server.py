"""Commands run their work in a server without front doors, and end with it or with a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from bench.server import wait_for

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = 'backend: "python"\noutput [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]'


def test_a_signal_ends_a_command_and_the_worker_that_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "slow" / "1").mkdir(parents=True)
    (tmp_path / "slow" / "config.pbtxt").write_text(CONFIG)
    begun = tmp_path / "begun"
    source = f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\ntime.sleep(3600)\n"
    (tmp_path / "slow" / "1" / "model.py").write_text(source)
    command = [sys.executable, "-m", "kernel", "models", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: begun.exists() and begun.read_text() != "")
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed, errors) == (130, "", "")
    worker = int(begun.read_text())
    wait_for(lambda: not _lives(worker))


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_log_and_what_models_print_is_shown_when_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "talks" / "1").mkdir(parents=True)
    (tmp_path / "talks" / "config.pbtxt").write_text(CONFIG)
    source = (
        "print('hello of the model')\n\n\nclass TritonPythonModel:\n    def execute(self, requests):\n        pass\n"
    )
    (tmp_path / "talks" / "1" / "model.py").write_text(source)
    for words, said in (([], False), (["--verbose"], True)):
        command = [sys.executable, "-m", "kernel", "models", str(tmp_path), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0
        assert ("hello of the model" in done.stderr) is said
