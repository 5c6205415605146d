"""A request that ends its worker takes no other request of its batch with it, and is refused when it comes again."""

from __future__ import annotations

import concurrent.futures
import json
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from bench.server import ServerProcess

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

CONFIG = """
max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
dynamic_batching { preferred_batch_size: [8] max_queue_delay_microseconds: 10000000 }
parameters { key: "naiad.isolate_poison" value { string_value: "true" } }
"""

#: Changes its inputs, as models may, before it ends the process for a certain value.
DIES = """
import os
class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        dies = any(array.flat[0] == 666 for array in arrays)
        for array in arrays:
            array += 1
        if dies:
            os._exit(3)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
"""


def clear(server: ServerProcess) -> Any:
    url = f"http://{server.url}/v2/models/m/poison/clear"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST")) as response:
        return json.load(response)


@pytest.mark.parametrize("size", [4, 5000])
def test_the_others_of_a_batch_are_served_and_the_culprit_is_refused_until_it_is_cleared(
    size: int, write_model: WriteModel
) -> None:
    with ServerProcess(write_model("m", CONFIG, DIES), "--model-control-mode=explicit", "--load-model=m") as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)

        def ask(value: float) -> Any:
            given = tritonclient.grpc.InferInput("IN", [1, size], "FP32")
            given.set_data_from_numpy(np.full((1, size), value, np.float32))
            try:
                return float(client.infer("m", [given]).as_numpy("OUT").flat[0])
            except InferenceServerException as error:
                return error

        def ask_together(*values: float) -> list[Any]:
            with concurrent.futures.ThreadPoolExecutor(len(values)) as threads:
                return list(threads.map(ask, values))

        values = (1, 2, 3, 666, 4, 5, 6, 7)
        found = ask_together(*values)
        culprit = found.pop(3)
        assert "was lost while it executed the request" in culprit.message()
        assert found == [2, 3, 4, 5, 6, 7, 8], "each was executed with its own inputs"
        again = ask(666)
        assert again.status() == "StatusCode.INVALID_ARGUMENT"
        assert "the same request has ended workers of model 'm' before" in again.message()
        assert 'naiad_poison_requests_total{model="m",version="1"} 1' in server.get("/metrics", server.metrics_port)[1]
        assert 'naiad_poison_refusals_total{model="m",version="1"} 1' in server.get("/metrics", server.metrics_port)[1]
        assert clear(server) == {"cleared": 1}
        *innocent, culprit = ask_together(*range(7), 666)
        assert innocent == [1, 2, 3, 4, 5, 6, 7]
        assert "was lost while it executed the request" in culprit.message()
        client.unload_model("m")
        client.load_model("m")
        *innocent, culprit = ask_together(*range(7), 666)
        assert innocent == [1, 2, 3, 4, 5, 6, 7]
        assert "was lost" in culprit.message(), "a reload forgets"
        client.close()
