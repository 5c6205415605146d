"""Models whose requests are traced, how a server is told to, and what the spans say."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.server import ServerProcess
    from kernel.tools.trace import ReadTrace
    from tests.kernel.records.collector import ReceivedSpan

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

TENSORS = """
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""

#: Adds one; an input that begins with -1 is an error, one that begins with -5 waits for its client to leave. The
#: context of its trace is in the parameters of its response.
PLUS_ONE = """
import time

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            while value[0] == -5 and not request.is_cancelled():
                time.sleep(0.005)
            if value[0] == -1:
                error = pb_utils.TritonError("minus one")
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            context = request.trace().get_context() or ""
            responses.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", value + 1)], parameters={"context": context}))
        return responses
"""

#: Calls `plus_one` twice, and passes its trace on with the first call only.
CALLS = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            for id, more in (("traced", {"trace": request.trace()}), ("not traced", {})):
                call = pb_utils.InferenceRequest(
                    model_name="plus_one", requested_output_names=["OUT"], inputs=[tensor], request_id=id, **more)
                called = call.exec()
                if called.has_error():
                    raise pb_utils.TritonModelException(called.error().message())
                tensor = pb_utils.Tensor("IN", pb_utils.get_output_tensor_by_name(called, "OUT").as_numpy())
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())]))
        return responses
"""

AROUND = """
platform: "ensemble"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step [
  { model_name: "calls" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }
] }
"""


def flags(*words: str) -> list[str]:
    return [f"--trace-config={word}" for word in words]


def infer(
    server: ServerProcess, model: str, values: Sequence[float], id: str = "r", **headers: str
) -> tuple[int, dict[str, Any]]:
    body = {"id": id, "inputs": [{"name": "IN", "shape": [len(values)], "datatype": "FP32", "data": list(values)}]}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        f"http://{server.url}/v2/models/{model}/infer", json.dumps(body).encode(), names, method="POST"
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def names(trace: ReadTrace) -> list[str]:
    return [name for name, _ in trace.events]


def ways(spans: Sequence[ReceivedSpan]) -> list[tuple[str, str]]:
    """Return for each span the names from it to the outermost one, and the parent of that."""
    by_id = {span.id: span for span in spans}
    found = []
    for span in spans:
        way = [span.name]
        while span.parent_id in by_id:
            span = by_id[span.parent_id]
            way.append(span.name)
        found.append((" < ".join(way), span.parent_id))
    return found
