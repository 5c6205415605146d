"""Iterative sequences: a model gives a request back until it is done with it."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from bench.server import ServerProcess

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

CONFIG = """
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
model_transaction_policy { decoupled: DECOUPLED }
sequence_batching {
  STRATEGY
  iterative_sequence: true
  max_sequence_idle_microseconds: 200000
  control_input [{ name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] }]
  control_input [{ name: "READY" control [{ kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] }] }]
  control_input [{ name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }] }]
  state [{ input_name: "STEP" output_name: "NEXT_STEP" data_type: TYPE_INT32 dims: [1] }]
}
"""

#: Counts in its state up to IN, one execution for each number.
COUNT = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = {t.name(): t.as_numpy().flatten()[0] for t in request.inputs()}
            step = array["STEP"] + 1
            if not array["READY"]:
                responses.append(pb_utils.InferenceResponse([]))
                continue
            assert bool(array["START"]) == (step == 1), array
            outputs = [pb_utils.Tensor("OUT", np.array([[step]], np.int32)),
                       pb_utils.Tensor("NEXT_STEP", np.array([[step]], np.int32))]
            done = step >= array["IN"]
            if not done:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            RESPOND
        return RETURN
"""

#: In the decoupled mode each execution responds with its number.
DECOUPLED = COUNT.replace("RESPOND", (
    "request.get_response_sender().send(pb_utils.InferenceResponse(outputs),"
    " pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if done else 0)")).replace("RETURN", "None")  # fmt: skip

#: Otherwise only the last one does, so the number of executions cannot be in a state that a response carries.
COUNTED = """
class TritonPythonModel:
    def initialize(self, args):
        self.steps = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            array = {t.name(): t.as_numpy().flatten()[0] for t in request.inputs()}
            id = int(array["CORRID"])
            if array["START"]:
                self.steps[id] = 0
            self.steps[id] = self.steps.get(id, 0) + 1
            if array["READY"] and self.steps[id] < array["IN"]:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
            else:
                out = pb_utils.Tensor("OUT", np.array([[self.steps[id]]], np.int32))
                responses.append(pb_utils.InferenceResponse([out]))
        return responses
"""


def given(value: int) -> Any:
    tensor = triton_grpc.InferInput("IN", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    return [tensor]


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 8 }"])
def test_a_request_is_executed_until_the_model_is_done(write_model: WriteModel, strategy: str) -> None:
    config = CONFIG.replace("STRATEGY", strategy).replace("DECOUPLED", "false")
    with (
        ServerProcess(write_model("m", config, COUNTED)) as server,
        triton_grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        wanted = [3, 1, 20, 7, 5, 2, 4, 9]
        for value in wanted:
            client.async_infer("m", given(value), callback=lambda result, error: results.put((result, error)))
        found = []
        for _ in wanted:
            result, error = results.get(timeout=60)
            assert error is None, error
            found.append(int(result.as_numpy("OUT").item()))
        assert sorted(found) == sorted(wanted)
        statistics = client.get_inference_statistics("m", as_json=True)["model_stats"][0]
        assert int(statistics["inference_stats"]["success"]["count"]) == len(wanted)
        assert int(statistics["execution_count"]) >= 20


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 8 }"])
def test_a_decoupled_model_responds_at_each_execution_and_keeps_its_state(
    write_model: WriteModel, strategy: str
) -> None:
    config = CONFIG.replace("STRATEGY", strategy).replace("DECOUPLED", "true")
    with (
        ServerProcess(write_model("m", config, DECOUPLED)) as server,
        triton_grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.start_stream(lambda result, error: results.put((result, error)))
        for value in (4, 2, 6, 1, 3):
            client.async_stream_infer("m", given(value), request_id=str(value))
        found: dict[str, list[int]] = {}
        for _ in range(4 + 2 + 6 + 1 + 3):
            result, error = results.get(timeout=60)
            assert error is None, error
            found.setdefault(result.get_response().id, []).append(int(result.as_numpy("OUT").item()))
        client.stop_stream()
        assert found == {str(value): list(range(1, value + 1)) for value in (4, 2, 6, 1, 3)}
