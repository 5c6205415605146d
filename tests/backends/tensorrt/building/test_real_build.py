"""`naiad build-engine` with a real TensorRT: that for RTX builds without a GPU. Skipped where it is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.checkout import ROOT
from kernel.tools.cli import run_command

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("tensorrt_rtx_bindings")


def test_an_onnx_file_becomes_a_plan_with_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ROOT / "kernel" / "demo" / "digits" / "1" / "model.onnx"
    shapes = [f"--{kind}-shapes=image:{count}x8x8" for kind, count in (("min", 1), ("opt", 8), ("max", 32))]
    options = [*shapes, f"--output={tmp_path / 'digits'}", "--compute-capability=8.6"]
    monkeypatch.setattr("sys.argv", ["naiad", "build-engine", str(model), *options])
    assert run_command() == 0
    assert (tmp_path / "digits" / "1" / "model.plan").stat().st_size > 10_000
    assert "max_batch_size: 32" in (tmp_path / "digits" / "config.pbtxt").read_text()
