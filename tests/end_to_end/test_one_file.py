"""One file and no repository: `naiad run FILE` serves it, and the requests that it prints get responses."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from bench.server import ServerProcess
from kernel.options import DEMO_REPOSITORY
from tests.backends.fil.conftest import fitted
from tests.backends.mlflow.conftest import LABEL, TENSOR, mlmodel
from tests.docs.documents import ROOT, code_blocks, document

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

joblib: Any = pytest.importorskip("joblib")
lightgbm: Any = pytest.importorskip("lightgbm")
xgboost: Any = pytest.importorskip("xgboost")
skops: Any = pytest.importorskip("skops.io", reason="needs the extra sklearn")
pytest.importorskip("treelite", reason="needs the extra fil")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def _classifier() -> Any:
    rows = np.random.default_rng(0).random((50, 4))
    return LogisticRegression().fit(rows, rows[:, 0] > 0.5)


def _trees(path: Path) -> None:
    fitted(xgboost.XGBRegressor, 0, max_depth=3).save_model(path)


def _lightgbm(path: Path) -> None:
    fitted(lightgbm.LGBMRegressor, 0, verbose=-1).booster_.save_model(path)


def _function(path: Path) -> None:
    path.write_text(code_blocks(document("docs/python-models.md"), "python")[1].text)


def _onnx(path: Path) -> None:
    shutil.copyfile(DEMO_REPOSITORY / "digits/1/model.onnx", path)


def _mlflow_folder(path: Path) -> None:
    path.mkdir()
    skops.dump(_classifier(), path / "model.skops")
    (path / "MLmodel").write_text(mlmodel("sklearn", {"pickled_model": "model.skops"}, TENSOR, LABEL))


#: Name → what writes the file or folder.
FILES: dict[str, Callable[[Path], object]] = {
    "churn.json": _trees,
    "churn.ubj": _trees,
    "churn.txt": _lightgbm,
    "churn.skops": lambda path: skops.dump(_classifier(), path),
    "churn.joblib": lambda path: joblib.dump(_classifier(), path),
    "churn.onnx": _onnx,
    "churn.py": _function,
    "churn": _mlflow_folder,
}


@pytest.mark.parametrize("name", FILES)
def test_the_printed_requests_of_a_file_get_responses(tmp_path: Path, name: str) -> None:
    FILES[name](tmp_path / name)
    with ServerProcess(tmp_path / name, "--allow-pickle=churn") as server:
        server.wait_for_log("Ctrl-C stops the server.")
        lines = re.findall(r"^    (.*(?: infer |curl ).+)$", server.log, re.MULTILINE)
        infer, curl = (shlex.split(line) for line in lines)
        command = [sys.executable, "-m", "kernel", *infer[infer.index("infer") :]]
        found = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        assert (found.returncode, found.stderr) == (0, "")
        responded = subprocess.run(curl, capture_output=True, text=True, check=True)
        response = json.loads(responded.stdout)
    assert response["model_name"] == "churn", response
    assert response["outputs"]
    assert all(each["data"] and each["name"] in found.stdout for each in response["outputs"])
