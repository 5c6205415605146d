"""Each ONNX model of the wheels gives bit for bit what onnxruntime gives, without a configuration.

`make test-onnx` fetches them and runs this; without them there is nothing to test.
"""

from __future__ import annotations

import shutil
import zlib
from typing import TYPE_CHECKING

import onnxruntime as ort
import pytest

from bench.server import ServerProcess
from tests.onnx_wheels.example_inputs import inputs_that_run
from tests.onnx_wheels.wheels import models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shm.arrays import Array

grpcclient = pytest.importorskip("tritonclient.grpc")

MODELS = models()

pytestmark = pytest.mark.skipif(not MODELS, reason="make test-onnx fetches the models")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository, "--model-control-mode=explicit") as running:
        yield running


def rows_of(array: Array, rank: int) -> Array:
    """Return an array in the shape that clients see: scalars, and rows of one number, have one dimension more."""
    return array.reshape(*array.shape, *([1] * (rank - array.ndim)))


@pytest.mark.slow
@pytest.mark.parametrize("path", MODELS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_served_model_gives_the_bytes_that_onnxruntime_gives(
    path: Path, repository: Path, server: ServerProcess
) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs, outputs = inputs_that_run(session, zlib.crc32(path.name.encode()))
    names = [node.name for node in session.get_outputs()]
    del session
    (repository / "model" / "1").mkdir(parents=True)
    (repository / "model" / "1" / "model.onnx").symlink_to(path)
    try:
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            client.load_model("model")
            metadata = client.get_model_metadata("model", as_json=True)
            tensors = []
            for given in metadata["inputs"]:
                array = rows_of(inputs[given["name"]], len(given["shape"]))
                tensor = grpcclient.InferInput(given["name"], list(array.shape), given["datatype"])
                tensor.set_data_from_numpy(array)
                tensors.append(tensor)
            result = client.infer("model", tensors)
            for name, expected in zip(names, outputs, strict=True):
                found = result.as_numpy(name)
                assert found.dtype == expected.dtype, name
                assert found.shape == rows_of(expected, found.ndim).shape, name
                assert found.tobytes() == expected.tobytes(), name
            client.unload_model("model")
    finally:
        shutil.rmtree(repository / "model")
