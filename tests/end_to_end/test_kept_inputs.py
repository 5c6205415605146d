"""Models that keep arrays of their inputs find them as they were, however the requests after them came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm

from bench.server import ServerProcess

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

CONFIG = """
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "LAST" data_type: TYPE_FP32 dims: [-1] }, { name: "FIRST" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""

# Answers the first input, and the one before this.
KEEPS = """
class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        responses = []
        for request in requests:
            self.kept.append(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
            tensors = [pb_utils.Tensor("LAST", self.kept[-2:][0]), pb_utils.Tensor("FIRST", self.kept[0])]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""

#: Elements of an input that travels in a message, and of one that lies in an arena.
SMALL, LARGE = 16, 1 << 16


def client_of(server: ServerProcess, protocol: str) -> tuple[Any, Any]:
    module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
    return module, module.InferenceServerClient(server.url if protocol == "http" else server.grpc_url)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_what_a_model_keeps_does_not_change(protocol: str, size: int, write_model: WriteModel) -> None:
    with ServerProcess(write_model("keeps", CONFIG, KEEPS)) as server:
        module, client = client_of(server, protocol)
        for value in range(1, 6):
            given = module.InferInput("IN", [size], "FP32")
            given.set_data_from_numpy(np.full(size, value, np.float32))
            answer = client.infer("keeps", [given])
            assert set(answer.as_numpy("FIRST")) == {1}
            assert set(answer.as_numpy("LAST")) == {max(1, value - 1)}
        client.close()


def test_a_model_that_keeps_a_clients_memory_is_given_copies_and_the_log_says_so(write_model: WriteModel) -> None:
    byte_size = LARGE * 4
    with ServerProcess(write_model("keeps", CONFIG, KEEPS)) as server:
        module, client = client_of(server, "http")
        region = shm.create_shared_memory_region("in", f"/naiad_kept_{server.pid}", byte_size)
        try:
            client.register_system_shared_memory("in", f"/naiad_kept_{server.pid}", byte_size)
            for value in range(1, 6):
                shm.set_shared_memory_region(region, [np.full(LARGE, value, np.float32)])
                given = module.InferInput("IN", [LARGE], "FP32")
                given.set_shared_memory("in", byte_size)
                answer = client.infer("keeps", [given])
                if value > 2:  # the first was in the client's memory, and the client has written there
                    assert set(answer.as_numpy("LAST")) == {value - 1}
            client.close()
            text = "the model still uses an input in a client's shared memory"
            server.wait_for_log(text)
            assert server.log.count(text) == 1
        finally:
            shm.destroy_shared_memory_region(region)
