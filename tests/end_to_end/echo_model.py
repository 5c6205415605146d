"""A Python model that returns its input, and a client of it."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.server import ServerProcess

CONFIG = """
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ kind: KIND_CPU count: 1 }]
metric_tags { key: "team" value: "core" }
model_metrics {
  metric_control [{
    metric_identifier { family: "nv_inference_first_response_histogram_ms" }
    histogram_options { buckets: [60000, 2.5] }
  }, {
    metric_identifier { family: "nv_other" } histogram_options { buckets: 1 }
  }]
}
"""

ECHO = """
import os

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if value[0][0] < 0:
                os._exit(7)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""


def infer(server: ServerProcess, rows: int, value: int) -> int:
    tensor = {"name": "IN", "datatype": "INT32", "shape": [rows, 1], "data": [value] * rows}
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", "/v2/models/echo/infer", json.dumps({"inputs": [tensor]}))
    status = connection.getresponse().status
    connection.close()
    return status
