"""Servers with front doors in processes of their own, their models, and what is known of the processes."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import psutil

from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOORS = 2

IDENTITY = """backend: "identity"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""

DOUBLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given * 2)]))
        return found
"""

SLEEPY = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            time.sleep(float(given[0]))
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)]))
        return found
"""


SEVERAL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            sender = request.get_response_sender()
            for number in range(int(given[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given * 0 + number)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_models(folder: Path) -> Path:
    """Write a repository with a model that returns its input, and others that double it, sleep, or respond often."""
    for name, source in (("echo", ""), ("double", DOUBLE), ("sleepy", SLEEPY), ("several", SEVERAL)):
        (folder / name / "1").mkdir(parents=True)
        config = IDENTITY if not source else IDENTITY.replace("identity", "python")
        if source is SEVERAL:
            config += "model_transaction_policy { decoupled: true }\n"
        (folder / name / "config.pbtxt").write_text(config)
        if source:
            (folder / name / "1" / "model.py").write_text(source)
    return folder


@contextlib.contextmanager
def serving(models: Path, *flags: str) -> Iterator[ServerProcess]:
    """A server whose front doors take connections."""
    with ServerProcess(models, f"--front-door-processes={DOORS}", *flags) as server:
        for number in range(1, DOORS + 1):
            server.wait_for_log(f"front door {number} takes connections")
        yield server
        assert "Traceback" not in server.log, server.log


def door_metric(server: ServerProcess, name: str) -> dict[int, float]:
    """Return the values of a metric of front doors, by the number of the door."""
    _, text = server.get("/metrics", server.metrics_port)
    found = re.findall(rf'^{name}{{door="(\d+)"}} (\S+)$', text, re.MULTILINE)
    return {int(number): float(value) for number, value in found}


def door_requests(server: ServerProcess) -> float:
    return sum(door_metric(server, "naiad_front_door_requests_total").values())


def door_processes(server: ServerProcess) -> dict[int, int]:
    """Return the processes of the front doors, by the number of the door."""
    found = {}
    for child in psutil.Process(server.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            title = re.search(r"--model=front door (\d+)", " ".join(child.cmdline()))
            if title is not None and child.status() != psutil.STATUS_ZOMBIE:
                found[int(title[1])] = child.pid
    return found


def pending_requests(server: ServerProcess, model: str) -> int:
    """Return how many requests of a model wait or are executed."""
    _, text = server.get("/metrics", server.metrics_port)
    found = re.search(rf'^nv_inference_pending_request_count{{model="{model}",version="1"}} (\d+)', text, re.MULTILINE)
    return -1 if found is None else int(found[1])
