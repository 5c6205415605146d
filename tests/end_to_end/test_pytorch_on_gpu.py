"""A PyTorch model on a GPU in a whole server: PyTorch and CUDA are fakes (`tests/fake_torch.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.http

from tests import fake_torch
from tests.end_to_end.gpu_models import doubled, server_on_fakes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.server import ServerProcess

pytestmark = pytest.mark.slow

#: In every process of the server: `import torch` finds the fake.
SITE = """
import sys
from tests.fake_torch import FakeTorch
sys.modules["torch"] = FakeTorch()
"""

CONFIG = """
backend: "pytorch"
max_batch_size: 8
input [{ name: "A" data_type: TYPE_FP32 dims: [-1] }, { name: "B" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "X" data_type: TYPE_FP32 dims: [-1] }, { name: "Y" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_GPU gpus: [0] }]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("gpu")
    version = root / "models/add_sub/1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    fake_torch.save(version / "model.pt", "add_sub", ("A", "TensorType"), ("B", "TensorType"))
    with server_on_fakes(root, SITE) as running:
        yield running


def test_requests_are_computed_on_the_gpu(server: ServerProcess) -> None:
    with tritonclient.http.InferenceServerClient(server.url) as client:
        for count in (1, 2048):
            a, b = (np.arange(3 * count, dtype=np.float32).reshape(3, count) * factor for factor in (3, 2))
            inputs = [tritonclient.http.InferInput(name, [3, count], "FP32") for name in "AB"]
            for each, array in zip(inputs, (a, b), strict=True):
                each.set_data_from_numpy(array)
            found = client.infer("add_sub", inputs)
            assert np.array_equal(found.as_numpy("X"), a + b)
            assert np.array_equal(found.as_numpy("Y"), a - b)


@pytest.mark.parametrize("count", [1, 2048])
def test_outputs_of_calls_stay_on_the_gpu(server: ServerProcess, count: int) -> None:
    for _ in range(2):
        doubled(server, count)
