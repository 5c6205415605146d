"""Instances that come and go with the load of a real server, while clients send requests."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
parameters { key: "naiad.autoscale" value { string_value: "max=3,up_after=100ms,down_after=500ms" } }
"""
MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.02)
        given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each)]) for each in given]
"""


def instances(server: ServerProcess) -> int:
    page = server.get("/metrics", server.metrics_port)[1]
    found = re.search(r'^naiad_model_instance_count\{model="m",version="1"\} (\d+)', page, re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.slow
def test_a_loaded_model_gets_instances_and_gives_them_back_and_no_request_is_lost(tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text(CONFIG)
    (tmp_path / "m/1/model.py").write_text(MODEL)
    statuses: Counter[int] = Counter()
    stop = threading.Event()

    def send(server: ServerProcess) -> None:
        body = json.dumps({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [7]}]})
        with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)) as connection:
            while not stop.is_set():
                connection.request("POST", "/v2/models/m/infer", body)
                response = connection.getresponse()
                statuses[response.status] += json.loads(response.read())["outputs"][0]["data"] == [7]

    with ServerProcess(tmp_path) as server:
        assert instances(server) == 1
        clients = [threading.Thread(target=send, args=(server,)) for _ in range(8)]
        for client in clients:
            client.start()
        try:
            wait_for(lambda: instances(server) == 3)
        finally:
            stop.set()
            for client in clients:
                client.join()
        wait_for(lambda: instances(server) == 1)
        wait_for(lambda: len(server.workers("m")) == 1)
        server.wait_for_log("has 2 instances instead of 1")
    assert set(statuses) == {200}
