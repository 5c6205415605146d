"""A model that computes on GPUs, and clients that send it tensors, also in regions on a GPU."""

from __future__ import annotations

import re
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import tritonclient.http

if TYPE_CHECKING:
    from bench.server import ServerProcess

#: Adds 1 on the device: the fake device is memory of the host, which the backend reads when the stream has come so far.
PLUS_ONE = """
import ctypes
import numpy as np
import onnx
from backends.base import Backend
from backends.batch_tensors import scatter
from backends.batch_tensors import batch_sizes
from backends.reshape import tensor_specs
from backends.worker.devices.tensors import DeviceArray


class PlusOne(Backend):
    device_inputs = True

    def load(self, arguments):
        self.device = self.host.device
        self.inputs, self.outputs = (tensor_specs(arguments.config, key) for key in ("input", "output"))
        self.max_batch_size = arguments.max_batch_size
        self.block = self.device.allocate(1 << 20)

    def execute(self, requests, timings):
        sizes = batch_sizes(requests, self.max_batch_size)
        array = self.device.gather(requests, self.inputs)["IN"]
        timings.inputs_ready()
        self.device.synchronize()
        values = np.frombuffer((ctypes.c_char * array.nbytes).from_address(array.address), np.float32) + 1
        out = self.device.reserve(requests[0], "OUT", "FP32", array.shape) if len(requests) == 1 else None
        if out is None:
            out = DeviceArray(self.block.address, "FP32", array.shape, self.device.device_id, self.block)
        ctypes.memmove(out.address, values.ctypes.data, values.nbytes)
        scatter(requests, sizes, {"OUT": out}, self.outputs)
"""

COUNT = 2000


class Client:
    """A client over HTTP."""

    def __init__(self, server: ServerProcess, model: str = "plus") -> None:
        self.model = model
        self.http = tritonclient.http.InferenceServerClient(server.url, concurrency=8)

    def given(self, values: Any) -> Any:
        return tritonclient.http.InferInput("IN", list(values.shape), "FP32").set_data_from_numpy(values)

    def infer(self, values: Any) -> Any:
        return self.http.infer(self.model, [self.given(values)]).as_numpy("OUT")


def rows(count: int, start: int = 0, columns: int = COUNT) -> Any:
    return np.arange(start, start + count * columns, dtype=np.float32).reshape(count, columns)


def page(server: ServerProcess) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
        return str(response.read().decode())


class Regions:
    """A client that shares memory of its GPU."""

    def __init__(self, server: ServerProcess, regions: Any, byte_size: int = 4 * COUNT) -> None:
        self.http = tritonclient.http.InferenceServerClient(server.url)
        self.regions = regions
        self.byte_size = byte_size
        self.memory = {name: regions.create_shared_memory_region(name, byte_size, 0) for name in ("in", "out")}
        for name, memory in self.memory.items():
            self.http.register_cuda_shared_memory(name, regions.get_raw_handle(memory), 0, byte_size)

    def infer(self, model: str, values: Any) -> Any:
        self.regions.set_shared_memory_region(self.memory["in"], [values])
        given = tritonclient.http.InferInput("IN", list(values.shape), "FP32")
        given.set_shared_memory("in", values.nbytes)
        wanted = tritonclient.http.InferRequestedOutput("OUT")
        wanted.set_shared_memory("out", self.byte_size)
        self.http.infer(model, [given], outputs=[wanted])
        return self.regions.get_contents_as_numpy(self.memory["out"], np.float32, values.shape)


def copies(server: ServerProcess, model: str) -> float:
    """Return how many tensors the workers of a model have copied."""
    found = re.search(rf'^naiad_copied_tensors_total{{model="{model}"[^}}]*}} (\S+)$', page(server), re.MULTILINE)
    assert found is not None, page(server)
    return float(found[1])


PYTHON_CONFIG = """
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1, -1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1, -1] }]
instance_group [{ kind: KIND_GPU }]
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "%s" } }
"""
