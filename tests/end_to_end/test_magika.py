"""A real model of other people: magika's ONNX file-type classifier, served, against magika itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.server import ServerProcess

magika = pytest.importorskip("magika")
grpcclient = pytest.importorskip("tritonclient.grpc")

ROOT = Path(__file__).parents[2]

#: Real files of this repository, of as many kinds as it has.
FILES = [
    "README.md", "pyproject.toml", "Makefile", "LICENSE", "kernel/app.py", "kernel/demo/digits/1/model.onnx",
    "kernel/demo/digit.json", "kernel/config/model_config.proto", ".ci/run", "tests/models/types/config.pbtxt",
]  # fmt: skip


@pytest.fixture(scope="module")
def identifier() -> Any:
    return magika.Magika()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with magika's model and no configuration: it is completed from the model file."""
    models = Path(magika.__file__).parent / "models"
    model = next(iter(sorted(models.glob("standard*/model.onnx"))))
    (tmp_path / "magika" / "1").mkdir(parents=True)
    (tmp_path / "magika" / "1" / "model.onnx").symlink_to(model)
    return tmp_path


def features(identifier: Any, path: Path) -> list[int]:
    """Return what magika feeds its model with for a file: the file's first and last bytes, padded."""
    _, found = identifier._get_result_or_features_from_path(path)
    assert found is not None, f"magika classifies {path} without its model"
    return [*found.beg, *found.mid, *found.end]


def test_files_are_classified_as_magika_does(identifier: Any, repository: Path) -> None:
    names = identifier._model_config.target_labels_space
    with ServerProcess(repository) as server, grpcclient.InferenceServerClient(server.grpc_url) as client:
        metadata = client.get_model_metadata("magika", as_json=True)
        given, taken = metadata["inputs"][0], metadata["outputs"][0]["name"]
        for name in FILES:
            path = ROOT / name
            row = np.array([features(identifier, path)], np.int32)
            tensor = grpcclient.InferInput(given["name"], list(row.shape), given["datatype"])
            tensor.set_data_from_numpy(row)
            scores = client.infer("magika", [tensor]).as_numpy(taken)[0]
            said = identifier.identify_path(path)
            assert str(names[int(scores.argmax())]) == str(said.dl.label), name
            assert abs(float(scores.max()) - said.score) < 1e-5, name
