"""What a GPU and this server do on it: run it whenever there is a GPU. It needs no network.

    python bench/gpu/check.py [--json FILE] [--quick] [--fake]

It needs Python, cuda-bindings and the server's own packages; torch and cupy are used if they are there. Each part is a
list of rows: what was looked at, the value, and whether it is as expected. A part that fails is a row, and the
others continue. `--fake` runs it on the CUDA of the tests, which shows that the file works, and no figures.

It is one file, so that it can be copied to a machine with a GPU and run there.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT))

import msgspec  # noqa: E402 - the file may be run by its path
import psutil  # noqa: E402

from bench.server import ServerProcess  # noqa: E402
from shm.cuda import BINDINGS_VARIABLE, HANDLE_BYTE_SIZE, Cuda, CudaError, DeviceMemory, cuda  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

_MIB = 1 << 20


class GpuRow(msgspec.Struct):
    """One result."""

    part: str
    what: str
    value: float | str
    unit: str = ""
    #: False for what is not as the server needs it, or failed.
    ok: bool = True


class GpuCheck:
    """The rows so far, and how often things are repeated."""

    def __init__(self, *, quick: bool) -> None:
        self.rows: list[GpuRow] = []
        self.repeats = 5 if quick else 200
        self.requests = 20 if quick else 3000
        self.sizes = (4096, _MIB) if quick else (4096, 65536, _MIB, 64 * _MIB)

    def run(self, part: str, work: Callable[[GpuCheck], list[GpuRow]]) -> None:
        """Add the rows of a part."""
        try:
            self.rows += work(self)
        except Exception as error:  # a driver or a library may raise anything: the other parts continue
            self.rows.append(GpuRow(part, "failed", f"{type(error).__name__}: {error}", ok=False))


def timed_us(action: Callable[[], object], count: int) -> float:
    """Return the median duration of `action` in microseconds."""
    durations = []
    for _ in range(count):
        start = time.perf_counter_ns()
        action()
        durations.append(time.perf_counter_ns() - start)
    return statistics.median(durations) / 1000


# ---- the machine and its ceilings ----------------------------------------------------------------


def machine(check: GpuCheck) -> list[GpuRow]:
    devices = cuda()
    rows = [
        GpuRow("machine", "python", platform.python_version()),
        GpuRow("machine", "processors", os.cpu_count() or 0),
    ]
    for number in range(devices.device_count):
        found = devices.properties(number)
        text = f"{found.name}, {found.uuid}, {found.byte_size >> 20} MiB, compute capability {found.capability}"
        rows.append(GpuRow("machine", f"GPU {number}", text))
    libraries = ("torch", "cupy", "onnxruntime", "tensorrt", "pynvml")
    there = {name: "there" if importlib.util.find_spec(name) else "not there" for name in libraries}
    return rows + [GpuRow("machine", name, text) for name, text in there.items()]


def ceilings(check: GpuCheck) -> list[GpuRow]:
    """Copies by size and direction, and the wait for an event: the least that a request costs."""
    devices, rows = cuda(), []
    stream, event = devices.new_stream(0), devices.new_event(0)
    most = check.sizes[-1]
    here, there, other = devices.allocate_pinned(most), devices.allocate(most, 0), devices.allocate(most, 0)
    pageable = (ctypes.c_char * most)()
    copies = {
        "host to device, pinned": (there, here),
        "device to host, pinned": (here, there),
        "host to device, pageable": (there, ctypes.addressof(pageable)),
        "device to device": (other, there),
    }
    for what, (target, source) in copies.items():
        for size in check.sizes:

            def copy(target: int = target, source: int = source, size: int = size) -> None:
                devices.enqueue_copy(target, source, size, stream)
                devices.wait(stream, event)

            took_us = timed_us(copy, check.repeats)
            rows.append(GpuRow("ceilings", f"{what}, {size} bytes", round(took_us, 1), "µs"))
            if size >= _MIB:
                rows.append(GpuRow("ceilings", f"{what}, {size} bytes", round(size / took_us / 1000, 2), "GB/s"))
    rows.append(
        GpuRow("ceilings", "wait for an event", round(timed_us(lambda: devices.wait(stream, event), 100), 1), "µs")
    )
    devices.free_pinned(here)
    for address in (there, other):
        devices.free(address, 0)
    took_us = timed_us(lambda: devices.free_pinned(devices.allocate_pinned(64 * _MIB)), 3)
    rows.append(GpuRow("ceilings", "pin and unpin 64 MiB", round(took_us / 1000, 2), "ms"))
    took_us = timed_us(lambda: devices.free(devices.allocate(_MIB, 0), 0), 20)
    return [*rows, GpuRow("ceilings", "allocate and free 1 MiB", round(took_us, 1), "µs")]


# ---- questions about IPC handles -----------------------------------------------------------------


def child(words: list[str]) -> dict[str, Any]:
    """Run this file in another process for `words`, and return what it says."""
    command = [sys.executable, __file__, "--child", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def opened_elsewhere(raw: bytes) -> dict[str, Any]:
    """Open a handle, twice. In another process."""
    devices = cuda()
    start = time.perf_counter_ns()
    try:
        first = devices.open_handle(raw, 0)
    except CudaError as error:
        return {"error": str(error), "reason": error.reason}
    opened_us = (time.perf_counter_ns() - start) / 1000
    second = devices.open_handle(raw, 0)
    content = bytearray(8)
    devices.copy_to_host(first, 0, memoryview(content))
    for memory in (second, first):
        devices.close_handle(memory)
    return {
        "us": opened_us,
        "same": first.address == second.address,
        "byte_size": first.byte_size,
        "content": content.hex(),
    }


def handles(check: GpuCheck) -> list[GpuRow]:
    devices, rows = cuda(), []
    address = devices.allocate(_MIB, 0)
    raw = devices.export_handle(address)
    devices.copy_from_host(DeviceMemory(address, _MIB, 0), 0, b"exported")
    found = child(["open", raw.hex()])
    rows.append(
        GpuRow("handles", "open in another process", found.get("us", found.get("error", "")), "µs", "us" in found)
    )
    rows.append(
        GpuRow(
            "handles", "the exporter's bytes", str(found.get("content")), ok=found.get("content") == b"exported".hex()
        )
    )
    same = bool(found.get("same"))
    rows.append(GpuRow("handles", "opened twice: the same address", "yes" if same else "no", ok=same))
    whole = found.get("byte_size", 0)
    rows.append(GpuRow("handles", "bytes that a handle of 1 MiB opens", whole, "bytes", whole >= _MIB))
    try:
        devices.open_handle(raw, 0)
        rows.append(GpuRow("handles", "the exporter opens its own handle", "possible"))
    except CudaError as error:
        rows.append(GpuRow("handles", "the exporter opens its own handle", f"{error}: {error.reason}"))
    devices.free(address, 0)
    found = child(["open", raw.hex()])
    rows.append(GpuRow("handles", "memory that was freed", found.get("error", "can be opened"), ok="error" in found))
    found = child(["open", "00" * HANDLE_BYTE_SIZE])
    rows.append(GpuRow("handles", "64 bytes of zeros", found.get("error", "can be opened"), ok="error" in found))
    return rows


# ---- the server ----------------------------------------------------------------------------------

_CONFIG = """
%s
max_batch_size: 32
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_GPU gpus: 0 }]
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }
"""

#: Copies its input on the device: the least that a model does.
_COPIES = """
from backends.base import Backend
from backends.reshape import tensor_specs
from backends.scatter import scatter
from backends.worker.devices.tensors import DeviceArray

class Copies(Backend):
    device_inputs = True

    def load(self, arguments):
        self.specs = [tensor_specs(arguments.config, key) for key in ("input", "output")]
        self.block = self.host.device.allocate(1 << 24)

    def execute(self, requests, timings):
        device = self.host.device
        given = device.gather(requests, self.specs[0])["IN"]
        timings.inputs_ready()
        place = device.reserve(requests[0], "OUT", "FP32", given.shape) if len(requests) == 1 else None
        if place is None:
            place = DeviceArray(self.block.address, "FP32", given.shape, device.device_id, self.block)
        device.enqueue(place.address, given.address, given.nbytes, crosses=False)
        sizes = [request.inputs[0].shape[0] for request in requests]
        scatter(requests, sizes, {"OUT": place}, self.specs[1])
"""

#: Passes tensors through a library, or through nothing but DLPack.
_PYTHON = """
import triton_python_backend_utils as pb_utils
%s

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN")
            assert not given.is_cpu()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", %s)]))
        return responses
"""
#: Gives its input to another model, and gives back the result.
_CALLS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="copies", requested_output_names=["OUT"],
                inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
            )
            response = call.exec()
            assert not response.has_error(), response.error().message()
            (result,) = response.output_tensors()
            assert not result.is_cpu()
            responses.append(pb_utils.InferenceResponse([result]))
        return responses
"""

#: Two steps.
_CHAIN = """
platform: "ensemble"
max_batch_size: 32
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step [
  { model_name: "copies" model_version: -1 input_map { key: "IN" value: "IN" }
    output_map { key: "OUT" value: "between" } },
  { model_name: "dlpack" model_version: -1 input_map { key: "IN" value: "between" }
    output_map { key: "OUT" value: "OUT" } }
] }
"""
_LIBRARIES = {
    "dlpack": ("", "given"),
    "torch": ("import torch", "torch.from_dlpack(given) * 1"),
    "cupy": ("import cupy", "cupy.from_dlpack(given) * 1"),
}


def write_models(folder: Path) -> list[str]:
    """Write a model for each library that is there; returns their names."""
    models = {"copies": (_CONFIG % 'backend: "copies"', "backend.py", _COPIES)}
    for name, (imports, result) in _LIBRARIES.items():
        if name == "dlpack" or importlib.util.find_spec(name):
            source = _PYTHON % (imports, result)
            models[name] = (_CONFIG % 'backend: "python"', "1/model.py", source)
    models["calls"] = (_CONFIG % 'backend: "python"', "1/model.py", _CALLS)
    models["chain"] = (_CHAIN, "1/none", "")
    for name, (config, file, source) in models.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        (folder / name / file).write_text(source)
    return list(models)


class RegionClient:
    """A client whose tensors are on the GPU."""

    def __init__(self, port: int, byte_size: int) -> None:
        self.http = HTTPConnection("127.0.0.1", port, timeout=60)
        self.devices = cuda()
        self.byte_size = byte_size
        self.memory = {name: DeviceMemory(self.devices.allocate(byte_size, 0), byte_size, 0) for name in ("in", "out")}
        for name, memory in self.memory.items():
            raw = base64.b64encode(self.devices.export_handle(memory.address)).decode()
            body = {"raw_handle": {"b64": raw}, "device_id": 0, "byte_size": byte_size}
            self.call(f"/v2/cudasharedmemory/region/{name}/register", body)

    def call(self, path: str, body: object) -> bytes:
        """Return the response to a POST. Raises `RuntimeError` with its text for an error."""
        self.http.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = self.http.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {text.decode(errors='replace')}")
        return text

    def body(self, rows: int) -> dict[str, object]:
        size: dict[str, object] = {"shared_memory_byte_size": self.byte_size}
        tensor: dict[str, object] = {"shape": [rows, self.byte_size // 4 // rows], "datatype": "FP32"}
        return {
            "inputs": [{"name": "IN", **tensor, "parameters": {"shared_memory_region": "in", **size}}],
            "outputs": [{"name": "OUT", "parameters": {"shared_memory_region": "out", **size}}],
        }

    def right(self, model: str, fill: int) -> bool:
        """Whether the output of a model is its input."""
        given = bytes([fill]) * self.byte_size
        self.devices.copy_from_host(self.memory["in"], 0, given)
        self.call(f"/v2/models/{model}/infer", self.body(1))
        found = bytearray(self.byte_size)
        self.devices.copy_to_host(self.memory["out"], 0, memoryview(found))
        return bytes(found) == given

    def close(self) -> None:
        self.http.close()
        for memory in self.memory.values():
            self.devices.free(memory.address, 0)


def copied_tensors(server: ServerProcess, model: str) -> float:
    """Return how many tensors were copied between host and device."""
    connection = HTTPConnection("127.0.0.1", server.metrics_port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    start = f'naiad_copied_tensors_total{{model="{model}"'
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))


def served(check: GpuCheck) -> list[GpuRow]:
    """Region → model → region: right bytes, no copies on the host, latency over the bare copy, and failures."""
    rows: list[GpuRow] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = write_models(folder)
        with ServerProcess(folder, start_timeout_s=300) as server:
            client = RegionClient(server.http_port, 4 * 150_528)  # an image of ResNet-50
            for model in models:
                right = client.right(model, 1) and client.right(model, 2)
                rows.append(GpuRow("server", f"{model}: the output is the input", "yes" if right else "no", ok=right))
                copies = copied_tensors(server, model)
                rows.append(GpuRow("server", f"{model}: copies between host and device", copies, ok=copies == 0))
            copies = sum(copied_tensors(server, model) for model in models)
            rows.append(GpuRow("server", "copies of all, after calls and steps", copies, ok=copies == 0))
            rows += latencies(check, client)
            rows += failures(server, client)
            client.close()
    return rows


def latencies(check: GpuCheck, client: RegionClient) -> list[GpuRow]:
    """The latency of a request over that of the bare copy, by the rows of the request."""
    devices, rows = client.devices, []
    stream, event = devices.new_stream(0), devices.new_event(0)

    def bare() -> None:
        target, source = client.memory["out"].address, client.memory["in"].address
        devices.enqueue_copy(target, source, client.byte_size, stream)
        devices.wait(stream, event)

    bare_us = timed_us(bare, check.repeats)
    rows.append(GpuRow("latency", "bare copy", round(bare_us, 1), "µs"))
    for count in (1, 8, 32):
        body = client.body(count)
        took_us = timed_us(lambda body=body: client.call("/v2/models/copies/infer", body), check.requests)  # type: ignore[misc]  # a default binds it
        rows.append(GpuRow("latency", f"request of {count} rows over HTTP", round(took_us, 1), "µs"))
        rows.append(GpuRow("latency", f"over the bare copy, {count} rows", round(took_us - bare_us, 1), "µs"))
    alone, body = "/v2/models/copies/infer", client.body(1)
    alone_us = timed_us(lambda: client.call(alone, body), check.requests)
    for model, what in (("calls", "a call of another model"), ("chain", "another step of an ensemble")):
        path = f"/v2/models/{model}/infer"
        took_us = timed_us(lambda path=path: client.call(path, body), check.requests)  # type: ignore[misc]  # as above
        rows.append(GpuRow("latency", f"{what}, over one request", round(took_us - alone_us, 1), "µs"))
    return rows


def failures(server: ServerProcess, client: RegionClient) -> list[GpuRow]:
    """A worker that is killed, and a client whose memory goes."""
    rows = []
    for process in psutil.Process(server.pid).children(recursive=True):
        if any(word.startswith("--model=copies") for word in process.cmdline()):
            process.send_signal(signal.SIGKILL)
    deadline, right = time.monotonic() + 60, False
    while not right and time.monotonic() < deadline:
        try:
            right = client.right("copies", 3)
        except RuntimeError:  # the request that the worker had begun
            time.sleep(0.05)
    rows.append(GpuRow("failures", "after kill -9 of the worker", "served" if right else "not served", ok=right))
    exporter = subprocess.Popen(
        [sys.executable, __file__, "--child", "export"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert exporter.stdout is not None
    raw = exporter.stdout.readline().strip()
    register = {"raw_handle": {"b64": raw}, "device_id": 0, "byte_size": 4096}
    client.call("/v2/cudasharedmemory/region/gone/register", register)
    exporter.kill()
    exporter.wait()
    body = client.body(1)
    inputs: Any = body["inputs"]
    inputs[0] |= {"shape": [1, 1024]}
    inputs[0]["parameters"] = {"shared_memory_region": "gone", "shared_memory_byte_size": 4096}
    try:
        client.call("/v2/models/copies/infer", body)
        text = "served"
    except (RuntimeError, OSError) as error:
        text = str(error)
    rows.append(GpuRow("failures", "after kill -9 of the client", text))
    client.http.close()
    right = client.right("copies", 4)
    return [*rows, GpuRow("failures", "another client after it", "served" if right else "not served", ok=right)]


# ---- the command ---------------------------------------------------------------------------------


def be_child(words: list[str]) -> None:
    """What other processes do for a part."""
    if words[0] == "open":
        print(json.dumps(opened_elsewhere(bytes.fromhex(words[1]))))
    elif words[0] == "export":
        devices: Cuda = cuda()
        print(base64.b64encode(devices.export_handle(devices.allocate(4096, 0))).decode(), flush=True)
        sys.stdin.read()


def main() -> int:
    parser = argparse.ArgumentParser(description="What a GPU and this server do on it.")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--quick", action="store_true", help="few repeats and small copies")
    parser.add_argument("--fake", action="store_true", help="on the CUDA of the tests: no figures")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fake:
        os.environ[BINDINGS_VARIABLE] = "tests.fake_cuda"
        os.environ["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if arguments.child:
        be_child(arguments.child)
        return 0
    check = GpuCheck(quick=arguments.quick)
    for part, work in (("machine", machine), ("ceilings", ceilings), ("handles", handles), ("server", served)):
        check.run(part, work)
    for row in check.rows:
        print(f"{'  ' if row.ok else '! '}{row.part:10} {row.what:50} {row.value} {row.unit}")
    if arguments.json is not None:
        settings = {
            "quick": arguments.quick,
            "fake": arguments.fake,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"settings": settings, "rows": check.rows}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 0 if all(row.ok for row in check.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
