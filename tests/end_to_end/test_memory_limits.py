"""A model that uses more memory than it may ends alone, and its clients read how much that was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from bench.server import ServerProcess

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

CONFIG = """
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""
LIMITED = CONFIG + 'parameters { key: "naiad.memory_limit" value { string_value: "200MiB" } }'

TAKES = """
import time
import numpy
class TritonPythonModel:
    def execute(self, requests):
        array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
        taken = [numpy.ones(1 << 20, numpy.uint8) for _ in range(array[0])]
        while array[0] > 1000:
            time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]
"""


def test_the_error_of_a_model_that_uses_too_much_memory_has_figures_and_others_are_served(
    write_model: WriteModel,
) -> None:
    write_model("greedy", LIMITED, TAKES)
    with ServerProcess(write_model("other", CONFIG, TAKES)) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)

        def ask(model: str, mebibytes: int) -> int:
            given = tritonclient.grpc.InferInput("IN", [1], "INT32")
            given.set_data_from_numpy(np.array([mebibytes], np.int32))
            return int(client.infer(model, [given]).as_numpy("OUT")[0])

        [other] = server.workers("other")
        assert ask("greedy", 10) == 10
        with pytest.raises(InferenceServerException) as error:
            ask("greedy", 1001)
        assert "it used " in error.value.message()
        assert "MiB of memory, and its model may use 200 MiB (naiad.memory_limit)" in error.value.message()
        assert ask("other", 11) == 11
        assert list(server.workers("other")) == [other]
        assert ask("greedy", 12) == 12, "another worker has taken its place"
        client.close()
