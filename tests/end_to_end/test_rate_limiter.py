"""Whole servers with the rate limiter: what executes at the same time, and which models are refused."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.http

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

#: Writes when each execution begins and ends, and waits in it until a file is there.
LOGS = """
import os, time
class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]
        self.folder = os.path.dirname(args["model_repository"])
    def log(self, what):
        with open(os.path.join(self.folder, "log"), "a") as log:
            log.write(f"{self.name} {what}\\n")
    def execute(self, requests):
        self.log("begins")
        while not os.path.exists(os.path.join(self.folder, "go")):
            time.sleep(0.002)
        self.log("ends")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]) for _ in requests]
"""


def config(count: int, batching: str = "") -> str:
    return f"""
max_batch_size: {4 if batching else 0}
input [{{ name: "IN" data_type: TYPE_FP32 dims: [1] }}]
output [{{ name: "OUT" data_type: TYPE_FP32 dims: [1] }}]
instance_group [{{ kind: KIND_CPU rate_limiter {{ resources [{{ name: "R" global: true count: {count} }}] }} }}]
{batching}
"""


def infer(server: ServerProcess, model: str, *, batched: bool = False) -> None:
    given = tritonclient.http.InferInput("IN", [1, 1] if batched else [1], "FP32")
    given.set_data_from_numpy(np.zeros((1, 1) if batched else 1, np.float32))
    with tritonclient.http.InferenceServerClient(server.url) as client:  # its end must run in this thread
        client.infer(model, [given])


def in_flight(server: ServerProcess) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(int(line.rpartition(" ")[2]) for line in lines if line.startswith("naiad_inference_in_flight_requests{"))


@pytest.mark.parametrize("batching", ["", "dynamic_batching {}"])
def test_models_that_need_one_resource_never_execute_at_the_same_time(batching: str, write_model: WriteModel) -> None:
    write_model("a", config(1, batching), LOGS)
    folder = write_model("b", config(1, batching), LOGS)
    with (
        ServerProcess(folder, "--rate-limit=execution_count", "--rate-limit-resource=R:1") as server,
        ThreadPoolExecutor(8) as pool,
    ):
        calls = [pool.submit(infer, server, model, batched=bool(batching)) for model in "abababab"]
        wait_for(lambda: in_flight(server) >= 8)
        (folder / "go").touch()
        for call in calls:
            call.result()
    lines = (folder / "log").read_text().splitlines()
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert all(begin == end.replace("ends", "begins") for begin, end in pairs), lines
    assert {begin for begin, _ in pairs} == {"a begins", "b begins"}


def test_a_model_that_needs_more_than_there_is_does_not_load(write_model: WriteModel) -> None:
    write_model("fits", config(5), LOGS)
    folder = write_model("large", config(6), LOGS)
    (folder / "go").touch()
    flags = ("--rate-limit=execution_count", "--rate-limit-resource=R:5", "--exit-on-error=false")
    with ServerProcess(folder, *flags) as server:
        infer(server, "fits")
        request = urllib.request.Request(f"http://{server.url}/v2/repository/index", b"", method="POST")
        with urllib.request.urlopen(request) as response:
            index = {item["name"]: item for item in json.load(response)}
    assert index["fits"]["state"] == "READY"
    assert index["large"]["reason"] == (  # as a real Triton 2.51 says it
        'Invalid argument: Resource count for "R" is limited to 5 which will prevent scheduling of one or more model '
        "instances, the minimum required count is 6"
    )


def test_a_reload_with_other_resources_has_effect_on_instances_that_serve(write_model: WriteModel) -> None:
    folder = write_model("m", config(1), LOGS)
    file = folder / "m" / "config.pbtxt"
    file.write_text(file.read_text().replace("instance_group [{", "instance_group [{ count: 2"))
    flags = ("--rate-limit=execution_count", "--rate-limit-resource=R:2", "--model-control-mode=explicit")
    with ServerProcess(folder, *flags, "--load-model=m") as server, ThreadPoolExecutor(4) as pool:
        file.write_text(file.read_text().replace("count: 1 }", "count: 2 }"))
        with tritonclient.http.InferenceServerClient(server.url) as client:
            client.load_model("m")
        calls = [pool.submit(infer, server, "m") for _ in range(4)]
        wait_for(lambda: in_flight(server) >= 4)
        (folder / "go").touch()
        for call in calls:
            call.result()
    assert (folder / "log").read_text().splitlines() == ["m begins", "m ends"] * 4


def test_without_the_limiter_the_setting_has_no_effect_and_the_log_says_so(write_model: WriteModel) -> None:
    folder = write_model("large", config(6), LOGS)
    (folder / "go").touch()
    with ServerProcess(folder, "--rate-limit-resource=R:5") as server:
        infer(server, "large")
        text = "rate_limiter (the server is started without --rate-limit=execution_count) has no effect"
        server.wait_for_log(text)


def test_a_worker_that_dies_gives_its_resources_back(write_model: WriteModel) -> None:
    dies = """
import os
class TritonPythonModel:
    def execute(self, requests):
        os._exit(1)
"""
    write_model("dies", config(1), dies)
    folder = write_model("lives", config(1), LOGS)
    (folder / "go").touch()
    with ServerProcess(folder, "--rate-limit=execution_count") as server:
        for _ in range(2):
            with pytest.raises(tritonclient.utils.InferenceServerException, match="worker"):
                infer(server, "dies")
            infer(server, "lives")
