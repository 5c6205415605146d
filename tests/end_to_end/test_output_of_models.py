"""What models print stops neither the server nor the model, however much it is, and also if nobody reads it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess, free_ports, wait_for

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

CONFIG = """
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""

# Prints as many lines of 100 bytes as the input says.
PRINTS = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for number in range(value[0]):
                print("x" * 99)
            print("printed", value[0], flush=True)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""


def infer(port: int, lines: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [lines]}]})
    connection.request("POST", "/v2/models/prints/infer", body)
    response = connection.getresponse()
    found: dict[str, Any] = json.loads(response.read())
    connection.close()
    return found


def count_of(name: str, page: str) -> float:
    [line] = [line for line in page.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def test_the_lines_of_a_model_have_the_same_prefix_before_and_after_a_restart(write_model: WriteModel) -> None:
    source = PRINTS.replace("def execute", "def initialize(self, args):\n        print('hello')\n\n    def execute")
    with ServerProcess(write_model("prints", CONFIG, source)) as server:
        wait_for(lambda: server.log.count('"prints: hello"') == 1)
        [worker] = server.workers("prints")
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: server.log.count('"prints: hello"') == 2)


@pytest.mark.parametrize("flags", [(), ("--log-model-lines=0", "--log-model-bytes=0")])
def test_a_server_whose_output_nobody_reads_serves_and_stops(write_model: WriteModel, flags: tuple[str, ...]) -> None:
    repository = write_model("prints", CONFIG, PRINTS)
    http_port, metrics_port = free_ports(2)
    server = subprocess.Popen(
        [sys.executable, "-m", "kernel", "run", f"--model-repository={repository}", "--allow-grpc=false",
         "--http-address=127.0.0.1", f"--http-port={http_port}", f"--metrics-port={metrics_port}", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        head = b""
        while b"Started Metrics" not in head:  # then nobody reads
            part = server.stdout.read(4096)
            assert part, head
            head += part
        for _ in range(3):
            assert infer(http_port, 200_000)["outputs"][0]["data"] == [200_000]
        if flags:  # all of it goes to the log, whose queue is full
            connection = http.client.HTTPConnection("127.0.0.1", metrics_port, timeout=60)
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
            connection.close()
            assert count_of("naiad_server_log_lines_lost_total", page) > 0
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()


def test_a_model_that_prints_50_megabytes_is_used_and_the_log_says_what_was_dropped(write_model: WriteModel) -> None:
    repository = write_model("prints", CONFIG, PRINTS)
    with ServerProcess(repository, "--log-model-lines=10") as server:
        assert infer(server.http_port, 500_000)["outputs"][0]["data"] == [500_000]
        wait_for(lambda: "of output were dropped" in server.log)
        wait_for(lambda: infer(server.http_port, 0)["outputs"][0]["data"] == [0] and "printed 0" in server.log)
        assert server.log.count("x" * 99) < 10_000
