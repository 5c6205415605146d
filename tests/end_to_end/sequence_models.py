"""Models with sequences, and clients for them, for the tests of whole servers."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.server import ServerProcess

CONTROLS = """
  control_input [{ name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] }]
  control_input [{ name: "END" control [{ kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] }] }]
  control_input [{ name: "READY" control [{ kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] }] }]
  control_input [{ name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: %s }] }]
"""

DIRECT = "direct { }"
OLDEST = "oldest { max_candidate_sequences: 4 }"


def config(strategy: str, *, idle_us: int = 5_000_000, count: int = 1, corrid: str = "TYPE_UINT64", more: str = "",
           batch: int = 4) -> str:  # fmt: skip
    """Return the configuration of a model with sequences; `more` stands in its `sequence_batching`."""
    return f"""
max_batch_size: {batch}
input [{{ name: "IN" data_type: TYPE_INT32 dims: [1] }}]
output [{{ name: "OUT" data_type: TYPE_INT32 dims: [1] }}, {{ name: "INFO" data_type: TYPE_STRING dims: [1] }}]
instance_group [{{ kind: KIND_CPU count: {count} }}]
sequence_batching {{
  max_sequence_idle_microseconds: {idle_us}
  {strategy}
  {CONTROLS % corrid}
  {more}
}}
"""


#: Adds up the values of each sequence. INFO tells what the model saw: controls, rows of the batch, and process.
ACCUMULATE = """
import json, os, time

def value(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0]

class TritonPythonModel:
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        responses = []
        ready = [bool(value(request, "READY")) for request in requests]
        for request in requests:
            corrid = value(request, "CORRID")
            corrid = corrid.decode() if isinstance(corrid, bytes) else int(corrid)
            given = int(value(request, "IN"))
            if value(request, "READY"):
                if value(request, "START"):
                    self.totals[corrid] = 0
                if given < 0:
                    time.sleep(-given / 1000)
                    given = 0
                self.totals[corrid] += given
            info = dict(start=int(value(request, "START")), end=float(value(request, "END")), corrid=corrid,
                        ready=ready, pid=os.getpid(), flags=request.flags(), version=VERSION)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", np.array([[self.totals.get(corrid, 0)]], np.int32)),
                pb_utils.Tensor("INFO", np.array([[json.dumps(info).encode()]], object))]))
        return responses
"""


def accumulate(version: int = 1) -> str:
    return ACCUMULATE.replace("VERSION", str(version))


class Client:
    """Sends requests of one sequence over HTTP."""

    def __init__(self, server: ServerProcess, model: str, sequence: int | str, timeout_s: float = 60) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._model = model
        self._sequence = sequence
        #: What the model saw at the last request.
        self.info: dict[str, Any] = {}
        #: The last status and error text.
        self.status, self.error = 0, ""

    def send(self, value: int, *, start: bool = False, end: bool = False, **parameters: Any) -> int | None:
        """Send one value and return the sum, or None after an error."""
        tensor = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [value]}
        told = {"sequence_id": self._sequence, "sequence_start": start, "sequence_end": end, **parameters}
        text = json.dumps({"inputs": [tensor], "parameters": told})
        connection = http.client.HTTPConnection("127.0.0.1", self._server.http_port, timeout=self._timeout_s)
        try:
            connection.request("POST", f"/v2/models/{self._model}/infer", text)
            response = connection.getresponse()
            self.status, body = response.status, json.loads(response.read())
        finally:
            connection.close()
        self.error = body.get("error", "")
        if self.error:
            return None
        outputs = {output["name"]: output["data"][0] for output in body["outputs"]}
        self.info = json.loads(outputs["INFO"])
        return int(outputs["OUT"])


def post(server: ServerProcess, path: str, body: Any = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body or {}))
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
