"""The check of a GPU, on the fake: all of its parts, without figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from bench.checkout import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def test_every_part_runs_and_is_as_expected_on_the_fake(tmp_path: Path) -> None:
    file = tmp_path / "results" / "fake.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "check.py"), "--fake", "--quick", f"--json={file}"]
    environment = {**os.environ, "NAIAD_NVML": "tests.fake_cuda.nvml"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert {row["part"] for row in found["rows"]} == {
        "machine", "ceilings", "pinned", "handles", "server", "latency", "host", "figures", "failures", "onnxruntime",
        "network", "capabilities", "pytorch", "streams", "offsets", "kinds",
    }  # fmt: skip
    assert [row for row in found["rows"] if not row.get("ok", True)] == []
    assert found["settings"]["fake"]


#: In every process: onnxruntime can use GPUs, those of the fake.
_SITE = """
import onnxruntime
from tests.fake_onnxruntime import FakeOnnxRuntime
fake, real = FakeOnnxRuntime(), onnxruntime.InferenceSession


def session(*arguments, **more):
    made = fake.InferenceSession if "CUDAExecutionProvider" in more["providers"] else real
    return made(*arguments, **more)


onnxruntime.InferenceSession = session
onnxruntime.get_available_providers, onnxruntime.preload_dlls = fake.get_available_providers, fake.preload_dlls
"""


def test_onnx_models_are_asked_on_the_gpu_where_onnxruntime_can_use_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SITE)
    file = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "check.py"), "--fake", "--quick",
               "--parts", "onnxruntime", "streams", f"--json={file}"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["what"]: row["value"] for row in json.loads(file.read_text())["rows"]}
    for mode in ("threads", "processes"):
        assert rows[f"onnx_{mode}_2: requests"] > 0
    assert rows["digits_gpu: 8 rows as on the CPU"] == "yes"
    assert rows["digits_graphs: 8 rows as on the CPU"] == "yes"


def test_a_part_that_fails_is_a_row() -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "check.py"), "--fake", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"FAKE_CUDA_DEVICES": "0"})
    assert done.returncode == 1
    assert "! machine" in done.stdout
    assert "CudaUnavailable: no GPU is visible" in done.stdout


def test_a_part_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "check.py"), "--fake", "--quick", "--limit=0",
               "--parts", "ceilings", "handles", f"--json={file}"]  # fmt: skip
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).returncode == 1
    rows = json.loads(file.read_text())["rows"]
    assert [(row["part"], row["value"]) for row in rows] == [
        ("ceilings", "it was ended after 0 s"), ("handles", "it was ended after 0 s"),
    ]  # fmt: skip


def test_parts_for_which_no_time_is_left_are_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "check.py"), "--fake", "--quick", "--total=0",
               "--parts", "machine", "streams", f"--json={file}"]  # fmt: skip
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).returncode == 1
    rows = json.loads(file.read_text())["rows"]
    assert [(row["part"], row["what"], row["value"]) for row in rows] == [
        ("machine", "not run", "no time is left (--total)"), ("streams", "not run", "no time is left (--total)"),
    ]  # fmt: skip
