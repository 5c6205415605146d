"""A model whose forked processes, those of a pool, call other models."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

from bench.server import ServerProcess

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

FLOATS = """
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""
TEXT = """
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_STRING dims: [1] }]
"""

DOUBLE = """
class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each * 2)]) for each in given]
"""

COUNT = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

POOLING = """
import asyncio, json, multiprocessing

def request_to(name, values):
    given = pb_utils.Tensor("IN", np.asarray(values, np.float32))
    return pb_utils.InferenceRequest(model_name=name, requested_output_names=["OUT"], inputs=[given])

def shown(response):
    if response.has_error():
        return response.error().message()
    return pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy().tolist()

def call(value):
    return shown(request_to("double", [value]).exec())

def call_large(value):
    return sum(shown(request_to("double", [value] * 100_000).exec()))

def call_nothing(value):
    return shown(request_to("nothing", [value]).exec())

def call_awaited(value):
    async def both():
        return await asyncio.gather(*(request_to("double", [value + n]).async_exec() for n in range(2)))
    return [shown(each) for each in asyncio.run(both())]

def call_count(value):
    responses = request_to("count", [value]).exec(decoupled=True)
    return [shown(each) for each in responses if each.output_tensors()]

def ready(value):
    return [pb_utils.is_model_ready("double"), pb_utils.is_model_ready("nothing")]

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().tolist()
            found = {}
            with multiprocessing.get_context("fork").Pool(4) as pool:
                for each in (call, call_large, call_nothing, call_awaited, call_count, ready):
                    found[each.__name__] = pool.map(each, values)
            found["own"] = [call(value) for value in values]
            out = np.array([json.dumps(found)], object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return responses
"""


def infer(server: ServerProcess, model: str, values: list[float]) -> Any:
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [len(values)], "data": values}]}
    request = urllib.request.Request(f"http://{server.url}/v2/models/{model}/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["outputs"][0]["data"]


def test_processes_of_a_pool_call_other_models(write_model: WriteModel) -> None:
    write_model("double", FLOATS, DOUBLE)
    write_model("count", FLOATS + "model_transaction_policy { decoupled: true }", COUNT)
    with ServerProcess(write_model("pooling", TEXT, POOLING)) as server:
        for _ in range(2):
            [text] = infer(server, "pooling", [1, 2, 3])
            unknown = "Model nothing - Error when running inference: Request for unknown model: 'nothing' is not found"
            assert json.loads(text) == {
                "call": [[2], [4], [6]],
                "call_large": [200_000, 400_000, 600_000],
                "call_nothing": [unknown] * 3,
                "call_awaited": [[[2], [4]], [[4], [6]], [[6], [8]]],
                "call_count": [[[0]], [[0], [1]], [[0], [1], [2]]],
                "ready": [[True, False]] * 3,
                "own": [[2], [4], [6]],
            }
        assert infer(server, "double", [5]) == [10]
