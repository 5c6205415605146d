"""One limit of memory for all models: a request beyond it is refused, and the next that fits is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from bench.server import ServerProcess

WriteModel = Callable[[str, str, str], Path]

CONFIG = """
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_UINT8 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_UINT8 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""

ADDS_ONE = """
class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + 1)]) for array in arrays]
"""

LIMIT = 1 << 20


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_beyond_the_limit_are_refused_and_cost_the_others_nothing(
    protocol: str, write_model: WriteModel
) -> None:
    write_model("a", CONFIG, ADDS_ONE)
    with ServerProcess(write_model("b", CONFIG, ADDS_ONE), f"--memory-byte-size={LIMIT}") as server:
        module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
        client = module.InferenceServerClient(server.url if protocol == "http" else server.grpc_url)

        def ask(model: str, byte_size: int) -> Any:
            given = module.InferInput("IN", [byte_size], "UINT8")
            given.set_data_from_numpy(np.full(byte_size, 7, np.uint8))
            return client.infer(model, [given]).as_numpy("OUT")

        for model in "ab" * 10:
            with pytest.raises(InferenceServerException) as refused:
                ask(model, LIMIT + 1)
            assert refused.value.message() == f"no memory left for a tensor of {LIMIT + 1} bytes; try again later"
            assert refused.value.status() == ("503" if protocol == "http" else "StatusCode.UNAVAILABLE")
            assert (ask(model, 300_000) == 8).all()
        client.close()
