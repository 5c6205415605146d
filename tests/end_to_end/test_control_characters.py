"""Names, ids and headers that would end a line of the log or control a terminal: nothing repeats them as they are."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from bench.server import ServerProcess, wait_for
from protocols.grpc.generated import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

HOSTILE = "x\nE1122 00:00:00.000000 1 forged] \x1b]0;owned\x07\x1b[2J\x9b\u2028end"
CONTROL = re.compile("[\0-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")
LINE = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ [\w.]+:\d+\] ")

CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""
REFUSE = """
class TritonPythonModel:
    def execute(self, requests):
        found = requests[0].parameters() + chr(27) + "[2J"
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError(found)) for _ in requests]
"""


def load(stub: grpc.Channel, name: str) -> tuple[grpc.StatusCode, str]:
    call = stub.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
    with pytest.raises(grpc.RpcError) as caught:
        call(pb.RepositoryModelLoadRequest(model_name=name).SerializeToString(), timeout=60)
    return caught.value.code(), caught.value.details()


def infer_over_http(server: ServerProcess, request_id: str) -> str:
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}
    body = json.dumps({"id": request_id, "inputs": [tensor]}).encode()
    request = urllib.request.Request(f"http://{server.url}/v2/models/refuse/infer", body)
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request, timeout=60):
        pass
    with caught.value as error:
        return str(json.loads(error.read())["error"])


def infer_over_grpc(channel: grpc.Channel, request_id: str, value: bytes) -> str:
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="INT32", shape=[1])
    message = pb.ModelInferRequest(model_name="refuse", id=request_id, inputs=[tensor], raw_input_contents=[bytes(4)])
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    metadata: Any = (("my-bin", value),)
    with pytest.raises(grpc.RpcError) as caught:
        call(message.SerializeToString(), metadata=metadata, timeout=60)
    return str(caught.value.details())


@pytest.mark.parametrize("log_format", ["default", "json"])
def test_no_control_character_reaches_a_log_a_metric_or_an_error(write_model: WriteModel, log_format: str) -> None:
    repository = write_model("refuse", CONFIG, REFUSE)
    (repository / HOSTILE.replace("/", "") / "1").mkdir(parents=True)
    flags = ("--model-control-mode=explicit", "--load-model=*", "--log-verbose=1", "--log-access=true",
             "--grpc-header-forward-pattern=my-", f"--log-format={log_format}")  # fmt: skip
    with ServerProcess(repository, *flags) as server:
        with grpc.insecure_channel(server.grpc_url) as channel:
            for name in (HOSTILE, "a\nb", "a\x1bb"):
                code, text = load(channel, name)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert text.endswith("', model name must not contain control characters")
                assert not CONTROL.search(text)
                assert "\n" not in text
            errors = [infer_over_grpc(channel, HOSTILE, HOSTILE.encode()), infer_over_http(server, HOSTILE)]
        assert [bool(CONTROL.search(error)) for error in errors] == [False, False]
        assert errors[0].endswith("\\u001b[2J")
        _, page = server.get("/metrics", server.metrics_port)
        assert not CONTROL.search(page)
        assert "forged" not in page, "a name that was refused became a label"
        _, index = server.get("/v2/models/stats")
        assert [each["name"] for each in json.loads(index)["model_stats"]] == ["refuse"]
        wait_for(lambda: len(forged_lines(server.log)) >= 3)  # threads write the log, later than responses
        log = server.log
    assert not CONTROL.search(log)
    assert "is ignored: its name contains control" in log
    for line in forged_lines(log):
        assert line.startswith("{") if log_format == "json" else LINE.match(line), line


def forged_lines(log: str) -> list[str]:
    """Return the lines of a log with the text that a client has sent to forge one."""
    return [line for line in log.splitlines() if "forged" in line]
