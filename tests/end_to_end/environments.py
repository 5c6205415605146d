"""Interpreters of this machine other than the one of the tests, with NumPy, and models that say where they run."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Versions of Python that workers are tested on, beside the one of the tests.
VERSIONS = ("3.9", "3.10", "3.12", "3.13")

#: Calls what workers do for models: places of tensors, BYTES, parameters, metrics, errors, completed configurations.
MODEL = """
import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_input({"name": "WORDS", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "BACK", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "PYTHON", "data_type": "TYPE_STRING", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="environment_calls_" + args["model_name"], description="calls", kind=pb_utils.MetricFamily.COUNTER
        )
        self.calls = self.family.Metric(labels={"model": args["model_name"]})
        pb_utils.Logger.log_info("this is " + sys.version)

    def execute(self, requests):
        responses = []
        for request in requests:
            self.calls.increment(1)
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            words = pb_utils.get_input_tensor_by_name(request, "WORDS").as_numpy()
            if given.size and given[0] < 0:
                error = pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse([], error))
                continue
            if given.size and given[0] == 99:
                os.abort()
            python = "%d.%d" % sys.version_info[:2]
            about = [python, "msgspec" if "msgspec" in sys.modules else "", os.environ.get("VIRTUAL_ENV", "")]
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("OUT", given * 2),
                        pb_utils.Tensor("BACK", words[::-1]),
                        pb_utils.Tensor("PYTHON", np.array([each.encode() for each in about], object)),
                    ]
                )
            )
        return responses
"""


def write_model(repository: Path, name: str, source: str = MODEL, config: str = "") -> Path:
    """Write a Python model; returns the folder of its version."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(source)
    (folder.parent / "config.pbtxt").write_text(f'backend: "python"\n{config}\n')
    return folder


def environment(path: str) -> str:
    """Return the lines of a configuration that name an environment."""
    return f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'


def interpreters(version: str) -> Iterator[str]:
    """Find interpreters of a version of Python: those of pyenv, of uv, and in the search path."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from (str(path) for path in sorted(root.glob(f"versions/{version}.*/bin/python")))
    uv = shutil.which("uv")
    if uv is not None:
        found = subprocess.run(
            [uv, "python", "find", "--no-python-downloads", version], capture_output=True, text=True, check=False
        )
        if found.returncode == 0:
            yield found.stdout.strip()
    if in_path := shutil.which(f"python{version}"):
        yield in_path


def with_numpy(version: str, kept: Path) -> Path:
    """Return a venv of a version of Python that has NumPy and no msgspec. It is kept in `kept` for other tests.

    Tests in several processes ask at once: one makes the venv, the others wait for it.
    Skips the test if this machine has no such interpreter, or NumPy cannot be installed for it.
    """
    folder = kept / f"python{version}"
    with (kept / f"python{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            make_venv(version, folder)
            (folder / "complete").touch()
    return folder


def make_venv(version: str, folder: Path) -> None:
    """Make a venv with NumPy in `folder`, or skip the test."""
    for python in interpreters(version):
        said = subprocess.run([python, "--version"], capture_output=True, text=True, check=False)
        if not re.match(rf"Python {re.escape(version)}\.", said.stdout):
            continue
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        for command in (
            [python, "-m", "venv", str(folder)],
            [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-input", "numpy"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean)
            if done.returncode:
                pytest.skip(f"no environment with Python {version} can be made here: {done.stderr[-300:]}")
        return
    pytest.skip(f"there is no Python {version} on this machine")
