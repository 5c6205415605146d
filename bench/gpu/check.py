"""What a GPU and this server do on it: run it whenever there is a GPU. It needs no network.

    python bench/gpu/check.py [--json FILE] [--quick] [--fake] [--parts PART ...] [--limit SECONDS] [--total SECONDS]

It needs Python, psutil, cuda-bindings and the server's own packages; torch, cupy and jax are used if they are there.
Before anything else it compares the versions of all packages with what the server and they themselves need. Parts run
in the order of their worth; those for which no time is left are rows that say so. Each part is a list of rows: what was
looked at, the value, and whether it is as expected. A part that fails is a row, and the others continue: each is a
process of its own, so that a driver that hangs, or that loses the device, ends one part. Rows are printed, and written
to FILE, as soon as they are there. `--fake` runs it on the CUDA of the tests, which shows that the file works, and no
figures.

The file is long because it is a list of small parts that nothing else uses: one file to run, beside the project's own.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import importlib
import importlib.util
import json
import math
import mmap
import os
import platform
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT))

from bench.gpu.packages import wrong_packages  # noqa: E402 - of the standard library only

if __name__ == "__main__" and (wrong := wrong_packages(_ROOT / "pyproject.toml")):
    sys.exit("these packages are missing or too old (bench/gpu/README.md says how to bring them):\n" + "\n".join(wrong))

import msgspec  # noqa: E402 - what is missing was said above
import psutil  # noqa: E402

from bench.server import ServerProcess  # noqa: E402
from shm.cuda import BINDINGS_VARIABLE, HANDLE_BYTE_SIZE, Cuda, CudaError, CudaUnavailable, DeviceMemory, cuda  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

_MIB = 1 << 20
#: The most characters of an error in a row.
_MOST_TEXT = 1500


class GpuRow(msgspec.Struct):
    """One result."""

    part: str
    what: str
    value: float | str
    unit: str = ""
    #: False for what is not as the server needs it, or failed.
    ok: bool = True


class SaidRows(list[GpuRow]):
    """The rows of a part, each printed in JSON when it is added: what comes later may end the process."""

    def append(self, row: GpuRow) -> None:
        super().append(row)
        print(msgspec.json.encode(row).decode(), flush=True)

    def __iadd__(self, rows: Iterable[GpuRow]) -> Self:  # type: ignore[misc,override]  # only rows are added
        for row in rows:
            self.append(row)
        return self


class GpuCheck:
    """The rows of the part that this process runs, and how often things are repeated."""

    def __init__(self, *, quick: bool) -> None:
        self.rows = SaidRows()
        self.quick = quick
        self.repeats = 5 if quick else 200
        self.requests = 20 if quick else 3000
        self.sizes = (4096, _MIB) if quick else (4096, 65536, _MIB, 64 * _MIB)

    def run(self, part: str, work: Callable[[GpuCheck], list[GpuRow]]) -> None:
        """Add the rows of a part, or of a piece of one. A failure is a row."""
        try:
            self.rows += work(self)
        except Exception as error:  # a driver or a library may raise anything: the other parts continue
            said = f": {error.stderr}" if isinstance(error, subprocess.CalledProcessError) else ""
            text = f"{error}{said}"
            if len(text) > _MOST_TEXT:  # the log of a server, whose end says why
                text = f"... {text[-_MOST_TEXT:]}"
            self.rows.append(GpuRow(part, "failed", f"{type(error).__name__}: {text}", ok=False))


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
    rows = check.rows
    rows.append(GpuRow("machine", "python", platform.python_version()))
    rows.append(GpuRow("machine", "processors", os.cpu_count() or 0))
    devices = cuda()
    for number in range(devices.device_count):
        found = devices.properties(number)
        text = f"{found.name}, {found.uuid}, {found.byte_size >> 20} MiB, compute capability {found.capability}"
        rows.append(GpuRow("machine", f"GPU {number}", text))
    libraries = ("torch", "cupy", "jax", "onnxruntime", "tensorrt", "pynvml")
    there = {name: "there" if importlib.util.find_spec(name) else "not there" for name in libraries}
    return [GpuRow("machine", name, text) for name, text in there.items()]


def ceilings(check: GpuCheck) -> list[GpuRow]:
    """Copies by size and direction, and the wait for an event: the least that a request costs."""
    devices, rows = cuda(), check.rows
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
    rows += launches(check, devices, stream, event)
    took_us = timed_us(lambda: devices.free_pinned(devices.allocate_pinned(64 * _MIB)), 3)
    rows.append(GpuRow("ceilings", "pin and unpin 64 MiB", round(took_us / 1000, 2), "ms"))
    took_us = timed_us(lambda: devices.free(devices.allocate(_MIB, 0), 0), 20)
    return [GpuRow("ceilings", "allocate and free 1 MiB", round(took_us, 1), "µs")]


def launches(check: GpuCheck, devices: Cuda, stream: Any, event: Any) -> list[GpuRow]:
    """What it costs to enqueue the least work, alone and ten of it in a graph."""
    address = devices.allocate(4096, 0)

    def ten() -> None:
        for _ in range(10):
            devices.enqueue_fill(address, 4, stream)

    ten()
    devices.wait(stream, event)
    rows = [GpuRow("ceilings", "enqueue a fill, of ten", round(timed_us(ten, check.repeats) / 10, 2), "µs")]
    devices.wait(stream, event)
    devices.begin_capture(stream)
    ten()
    graph = devices.end_capture(stream)
    took_us = timed_us(lambda: devices.launch_graph(graph, stream), check.repeats)
    devices.wait(stream, event)
    devices.destroy_graph(graph)
    devices.free(address, 0)
    return [*rows, GpuRow("ceilings", "launch a graph of ten fills", round(took_us, 2), "µs")]


# ---- pinned shared memory ------------------------------------------------------------------------


def pinned(check: GpuCheck) -> list[GpuRow]:
    """Arenas that are pinned where they are: how long it takes, how fast copies are, and that their pages must stay."""
    devices, rows, size = cuda(), check.rows, check.sizes[-1]
    devices.use(0)
    fd = os.memfd_create("naiad check")
    os.ftruncate(fd, size)
    mapping = mmap.mmap(fd, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    mapping[:] = b"1" * size
    start = time.perf_counter()
    devices.pin(address, size)
    rows.append(GpuRow("pinned", f"pin {size} bytes of a memfd", round((time.perf_counter() - start) * 1000, 2), "ms"))
    stream, event = devices.new_stream(0), devices.new_event(0)
    there = devices.allocate(size, 0)
    for what, (target, source) in {"host to device": (there, address), "device to host": (address, there)}.items():

        def copy(target: int = target, source: int = source) -> None:
            devices.enqueue_copy(target, source, size, stream)
            devices.wait(stream, event)

        took_us = timed_us(copy, min(check.repeats, 20))
        rows.append(GpuRow("pinned", f"{what}, {size} bytes of a memfd", round(size / took_us / 1000, 2), "GB/s"))
    mapping.madvise(mmap.MADV_REMOVE, 0, 4096)
    mapping[:4096] = b"2" * 4096
    devices.enqueue_copy(there, address, 4096, stream)
    devices.wait(stream, event)
    found = bytearray(1)
    devices.copy_to_host(DeviceMemory(there, size, 0), 0, memoryview(found))
    seen = {b"1": "the old page", b"2": "the new page"}.get(bytes(found), f"{bytes(found)!r}")
    rows.append(GpuRow("pinned", "a pinned page that was given back: the GPU reads", seen))
    start = time.perf_counter()
    devices.unpin(address)
    rows.append(GpuRow("pinned", "unpin", round((time.perf_counter() - start) * 1000, 2), "ms"))
    os.close(fd)
    text = over_the_end(devices, stream, event, there)  # the last one: nobody knows what it leaves
    return [GpuRow("pinned", "a copy over the end of pinned memory", text)]


def over_the_end(devices: Cuda, stream: Any, event: Any, there: int) -> str:
    """What a copy of memory gives of which only the beginning is pinned. The server makes two copies of it."""
    with mmap.mmap(-1, 16 * mmap.PAGESIZE) as half:
        view = ctypes.c_char.from_buffer(half)
        address = ctypes.addressof(view)
        del view
        devices.pin(address, 8 * mmap.PAGESIZE)
        try:
            devices.enqueue_copy(there, address, 16 * mmap.PAGESIZE, stream)
            devices.wait(stream, event)
            return "works"
        except CudaError as error:
            return str(error)
        finally:
            devices.unpin(address)


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
    devices, rows = cuda(), check.rows
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
    return [GpuRow("handles", "64 bytes of zeros", found.get("error", "can be opened"), ok="error" in found)]


def more_handles(check: GpuCheck) -> list[GpuRow]:
    """Who else may open a handle, and what a process sees whose exporter frees the memory or ends."""
    devices, rows = cuda(), check.rows
    first, second = devices.allocate(4096, 0), devices.allocate(4096, 0)
    for address, content in ((first, b"first..."), (second, b"second..")):
        devices.copy_from_host(DeviceMemory(address, 4096, 0), 0, content)
    raw = devices.export_handle(second)
    small = child(["open", raw.hex()])
    right = small.get("content") == b"second..".hex()
    rows.append(GpuRow("handles", "a small allocation has its own bytes", "yes" if right else str(small), ok=right))
    size = small.get("byte_size", 0)
    rows.append(GpuRow("handles", "bytes that a handle of 4 KiB opens", size, "bytes", size >= 4096))
    try:
        inside = child(["open", devices.export_handle(first + 1024).hex()])
        at_start = inside.get("content") == b"first...".hex()
        text = "opens its begin" if at_start else str(inside.get("error", "opens there"))
    except CudaError as error:
        text = str(error)
    rows.append(GpuRow("handles", "a pointer into an allocation", text))
    with Holder(raw) as one, Holder(raw) as other:
        both = one.opened and other.opened
        rows.append(GpuRow("handles", "two processes at once", "yes" if both else f"{one.text}, {other.text}", ok=both))
    rows.append(GpuRow("handles", "from another PID namespace", in_namespace(["open", raw.hex()])))
    held = Holder(raw)
    devices.free(second, 0)
    rows.append(GpuRow("handles", "freed by the exporter while it is open", held.copy()))
    exporter = subprocess.Popen([sys.executable, __file__, "--child", "export"], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert exporter.stdout is not None
    held = Holder(base64.b64decode(exporter.stdout.readline()))
    exporter.kill()
    exporter.wait()
    rows.append(GpuRow("handles", "open while its exporter is killed", held.copy()))
    devices.free(first, 0)
    found = child(["fork"])
    rows.append(GpuRow("handles", "CUDA in a fork of a process that imported it", found["text"]))
    return [GpuRow("handles", "start of a process until it has a context", found["context_ms"], "ms")]


class Holder:
    """Another process that opens a handle, and copies from the memory when it is asked to."""

    def __init__(self, raw: bytes) -> None:
        command = [sys.executable, __file__, "--child", "hold", raw.hex()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.text = self._process.stdout.readline().strip()
        self.opened = self.text == "opened"

    def copy(self) -> str:
        """Return what a copy gives now, and end the process."""
        try:
            return self._process.communicate("copy\n", timeout=60)[0].strip() or f"rc {self._process.returncode}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "hangs"

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("", timeout=60)


def in_namespace(words: list[str]) -> str:
    """Return what this file says for `words` in a PID namespace of its own."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    command = [*unshare, sys.executable, __file__, "--child", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not tried: {error}"
    if done.returncode or not done.stdout:
        return f"not tried: {done.stderr.strip().splitlines()[-1:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    return str(found.get("error", "can be opened")) + (f": {found['reason']}" if found.get("reason") else "")


def capabilities(check: GpuCheck) -> list[GpuRow]:
    """What the driver says that it can, and which memory has no handle. Calls that the server itself does not make."""
    runtime: Any = importlib.import_module(f"{os.environ.get(BINDINGS_VARIABLE) or 'cuda.bindings'}.runtime")
    devices, rows = cuda(), check.rows
    devices.use(0)
    for name in ("cudaDevAttrIpcEventSupport", "cudaDevAttrHostRegisterSupported", "cudaDevAttrUnifiedAddressing"):
        attribute = getattr(runtime.cudaDeviceAttr, name, None)
        value = "not there" if attribute is None else str(runtime.cudaDeviceGetAttribute(attribute, 0)[-1])
        rows.append(GpuRow("capabilities", name, value, ok=value != "0"))
    if not hasattr(runtime, "cudaMallocAsync"):  # the fake of the tests
        return []
    stream = devices.new_stream(0)
    code, address = runtime.cudaMallocAsync(4096, stream)
    if not int(code):
        try:
            devices.export_handle(int(address))
            text = "it is exported"
        except CudaError as error:
            text = str(error)
        rows.append(GpuRow("capabilities", "a handle of memory of a pool (cudaMallocAsync)", text))
        runtime.cudaFreeAsync(address, stream)
    own = devices.allocate(4096, 0)
    _, found = runtime.cudaPointerGetAttributes(own)
    rows.append(GpuRow("capabilities", "the device of a pointer", int(found.device), ok=int(found.device) == 0))
    devices.free(own, 0)
    if devices.device_count > 1:
        raw = devices.export_handle(devices.allocate(4096, 1))
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
        command = [sys.executable, __file__, "--child", "open", raw.hex()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=hidden)
        rows.append(GpuRow("capabilities", "a handle of a GPU that is not visible", done.stdout.strip()))
    return []


def hold(raw: bytes) -> None:
    """Open a handle, and copy from it after a line of input. In another process."""
    devices = cuda()
    try:
        memory = devices.open_handle(raw, 0)
    except CudaError as error:
        print(error, flush=True)
        return
    print("opened", flush=True)
    if not sys.stdin.readline():
        return
    content = bytearray(8)
    try:
        devices.copy_to_host(memory, 0, memoryview(content))
        print(f"the copy works: {bytes(content)!r}")
    except CudaError as error:
        print(f"{error}{', and the device is lost' if error.is_sticky else ''}")


def forked() -> dict[str, Any]:
    """Use CUDA in a fork of a process that has only imported it. In another process."""
    start = time.perf_counter()
    importlib.import_module(f"{os.environ.get(BINDINGS_VARIABLE) or 'cuda.bindings'}.runtime")
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            devices = cuda()
            devices.free(devices.allocate(4096, 0), 0)
            os.write(writing, b"works")
        except (CudaError, CudaUnavailable) as error:
            os.write(writing, str(error).encode()[:500])
        finally:  # whatever it was: the fork must not go on with what its parent does
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(pid, 0)
    text = os.read(reading, 500).decode() or f"the fork ended with status {status}"
    return {"text": text, "context_ms": round((time.perf_counter() - start) * 1000, 1)}


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
from backends.batch_tensors import scatter
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
#: Gives its input to another model, or to an ensemble, and gives back the result.
_CALLS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="%s", requested_output_names=["OUT"],
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
_BATCHING = "dynamic_batching { max_queue_delay_microseconds: 2000 }\n"
_LIBRARIES = {
    "dlpack": ("", "given"),
    "torch": ("import torch", "torch.from_dlpack(given) * 1"),
    "cupy": ("import cupy", "cupy.from_dlpack(given) * 1"),
    # Without the variable jax takes three quarters of the GPU.
    "jax": (
        'import os\nos.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"\nimport jax.dlpack',
        "jax.dlpack.from_dlpack(given) * 1",
    ),
}


def write_models(folder: Path) -> list[str]:
    """Write a model for each library that is there; returns their names."""
    models = {"copies": (_CONFIG % 'backend: "copies"', "backend.py", _COPIES)}
    for name, (imports, result) in _LIBRARIES.items():
        if name == "dlpack" or importlib.util.find_spec(name):
            source = _PYTHON % (imports, result)
            models[name] = (_CONFIG % 'backend: "python"', "1/model.py", source)
    models["batched"] = (_CONFIG % 'backend: "batched"' + _BATCHING, "backend.py", _COPIES)
    models["calls"] = (_CONFIG % 'backend: "python"', "1/model.py", _CALLS % "copies")
    models["chain"] = (_CHAIN, "1/none", "")
    models["calls_chain"] = (_CONFIG % 'backend: "python"', "1/model.py", _CALLS % "chain")
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
        """Whether the output of a model is its input, which is left as it was."""
        given = bytes([fill]) * self.byte_size
        self.devices.copy_from_host(self.memory["in"], 0, given)
        self.call(f"/v2/models/{model}/infer", self.body(1))
        found = bytearray(self.byte_size)
        for memory in self.memory.values():
            self.devices.copy_to_host(memory, 0, memoryview(found))
            if found != given:
                return False
        return True

    def close(self) -> None:
        self.http.close()
        for memory in self.memory.values():
            self.devices.free(memory.address, 0)


def copied_tensors(server: ServerProcess, model: str) -> float:
    """Return how many tensors were copied between host and device."""
    start = f'naiad_copied_tensors_total{{model="{model}"'
    return sum(float(line.rsplit(" ", 1)[1]) for line in page(server) if line.startswith(start))


def page(server: ServerProcess) -> list[str]:
    """Return the lines of the metrics page."""
    connection = HTTPConnection("127.0.0.1", server.metrics_port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return lines


def served(check: GpuCheck) -> list[GpuRow]:
    """Region → model → region: right bytes, no copies on the host, latency over the bare copy, and failures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = write_models(folder)
        with ServerProcess(folder, "--exit-on-error=false", start_timeout_s=300) as server:
            client = RegionClient(server.http_port, 4 * 150_528)  # an image of ResNet-50
            for model in models:
                check.run("server", lambda check, model=model: from_region_to_region(server, client, model))  # type: ignore[misc]  # a default binds it
            copies = sum(copied_tensors(server, model) for model in models)
            check.rows.append(GpuRow("server", "copies of all, after calls and steps", copies, ok=copies == 0))
            check.run("latency", lambda check: latencies(check, client))
            check.run("host", lambda check: from_the_host(check, server))
            check.run("figures", lambda check: figures(server))
            check.run("failures", lambda check: killed_in_flight(server, client))
            check.run("failures", lambda check: failures(server, client))
            check.run("offsets", lambda check: at_offsets(client))
            client.close()
    return []


def at_offsets(client: RegionClient) -> list[GpuRow]:
    """Tensors of clients that do not begin at a multiple of 256 bytes: kernels of libraries would end the process."""
    rows, size = [], 4096
    for offset in (0, 4, 16, 252, 256):
        given = bytes([7 + offset % 3]) * size
        client.devices.copy_from_host(client.memory["in"], offset, given)
        body: Any = client.body(1)
        body["inputs"][0]["shape"] = [1, size // 4]
        for tensor in (*body["inputs"], *body["outputs"]):
            tensor["parameters"] |= {"shared_memory_byte_size": size, "shared_memory_offset": offset}
        for model in ("copies", "dlpack"):
            client.devices.copy_from_host(client.memory["out"], offset, bytes(size))
            client.call(f"/v2/models/{model}/infer", body)
            found = bytearray(size)
            client.devices.copy_to_host(client.memory["out"], offset, memoryview(found))
            right = bytes(found) == given
            rows.append(GpuRow("offsets", f"{model}: tensors at {offset}", "right" if right else "wrong", ok=right))
    return rows


def from_region_to_region(server: ServerProcess, client: RegionClient, model: str) -> list[GpuRow]:
    try:
        right = client.right(model, 1) and client.right(model, 2)
    except RuntimeError as error:
        return [GpuRow("server", f"{model}: the output is the input", str(error), ok=False)]
    copies = copied_tensors(server, model)
    return [
        GpuRow("server", f"{model}: the output is the input", "yes" if right else "no", ok=right),
        GpuRow("server", f"{model}: copies between host and device", copies, ok=copies == 0),
    ]


# ---- tensors of the host -------------------------------------------------------------------------


class HostClient:
    """A client whose tensors are in the messages, or in a region of the host."""

    def __init__(self, port: int) -> None:
        self._http = HTTPConnection("127.0.0.1", port, timeout=60)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[bytes, int]:
        """Return the response and how long its JSON is. Raises `RuntimeError` with its text for an error."""
        self._http.request("POST", path, body, headers)
        response = self._http.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {text.decode(errors='replace')}")
        return text, int(response.headers.get("Inference-Header-Content-Length", len(text)))

    def infer(self, model: str, given: bytes, name: str = "IN", shape: tuple[int, ...] = ()) -> bytes:
        """Return the output for an input of one row, of this shape if there is one; both are in the messages."""
        tensor = {"name": name, "shape": [1, *(shape or (len(given) // 4,))], "datatype": "FP32",
                  "parameters": {"binary_data_size": len(given)}}  # fmt: skip
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        text, start = self.post(f"/v2/models/{model}/infer", head + given, headers)
        return text[start:]

    def infer_in_region(self, model: str, byte_size: int) -> None:
        """Let a model read the first half of the region `check`, and write its second half."""
        place = {"shared_memory_region": "check", "shared_memory_byte_size": byte_size}
        tensor = {"name": "IN", "shape": [1, byte_size // 4], "datatype": "FP32", "parameters": place}
        output = {"name": "OUT", "parameters": {**place, "shared_memory_offset": byte_size}}
        body = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
        self.post(f"/v2/models/{model}/infer", body, {"Content-Type": "application/json"})

    def close(self) -> None:
        self._http.close()


def from_the_host(check: GpuCheck, server: ServerProcess) -> list[GpuRow]:
    """Inputs and outputs on the host of models on a GPU: alone, in batches, and in memory that is pinned meanwhile."""
    client = HostClient(server.http_port)
    for byte_size in (64, 4096, 4 * 150_528, 4 * _MIB):
        given = [bytes([number]) * byte_size for number in range(1, 41)]
        right = all(client.infer("copies", each) == each for each in given)
        what = f"{byte_size} bytes in messages: the outputs are the inputs"
        check.rows.append(GpuRow("host", what, "yes" if right else "no", ok=right))
        took_us = timed_us(lambda given=given: client.infer("copies", given[0]), check.repeats)  # type: ignore[misc]  # a default binds it
        check.rows.append(GpuRow("host", f"{byte_size} bytes in messages", round(took_us, 1), "µs"))
    check.run("host", lambda check: in_batches(server))
    check.run("host", lambda check: small_outputs(check, server))
    check.run("host", lambda check: in_host_region(client))
    client.close()
    return []


def in_batches(server: ServerProcess) -> list[GpuRow]:
    """Requests of several clients at a time, which share executions."""
    wrong = list[str]()

    def infer(number: int) -> None:
        client = HostClient(server.http_port)
        for fill in range(20):
            given = bytes([8 * fill + number]) * 65_536
            try:
                if client.infer("batched", given) != given:
                    wrong.append(f"client {number}, request {fill}")
            except (RuntimeError, OSError) as error:
                wrong.append(str(error))
        client.close()

    threads = [threading.Thread(target=infer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [GpuRow("host", "batches of 8 clients: wrong outputs of 160", f"{len(wrong)} {wrong[:1]}", ok=not wrong)]


def small_outputs(check: GpuCheck, server: ServerProcess) -> list[GpuRow]:
    """Requests of 64 bytes of 16 clients, in batches: what the worker's processor has to do for each."""
    workers = [process for process in psutil.Process(server.pid).children(recursive=True) if _is_of(process, "batched")]
    before = sum(sum(worker.cpu_times()[:2]) for worker in workers)
    count = 10 if check.quick else 500
    failed = list[str]()

    def infer() -> None:
        client, given = HostClient(server.http_port), b"7" * 64
        try:
            for _ in range(count):
                if client.infer("batched", given) != given:
                    failed.append("another output")
        except (RuntimeError, OSError) as error:
            failed.append(str(error))
        client.close()

    start = time.perf_counter()
    threads = [threading.Thread(target=infer) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    took_s = time.perf_counter() - start
    used_us = 1e6 * (sum(sum(worker.cpu_times()[:2]) for worker in workers) - before) / (16 * count)
    return [
        GpuRow("host", "64 bytes in batches of 16 clients", round(16 * count / took_s), "1/s", ok=not failed),
        GpuRow("host", "the worker's processor for each of these", round(used_us, 1), "µs", ok=bool(workers)),
    ]


def in_host_region(client: HostClient) -> list[GpuRow]:
    """A region of a client in shared memory, used so often that it is pinned."""
    size, name = 4 * _MIB, f"naiad_check_{os.getpid()}"
    path = Path("/dev/shm") / name
    try:
        path.write_bytes(bytes(2 * size))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 2 * size) as memory:
            register = json.dumps({"key": f"/{name}", "offset": 0, "byte_size": 2 * size}).encode()
            json_headers = {"Content-Type": "application/json"}
            client.post("/v2/systemsharedmemory/region/check/register", register, json_headers)
            wrong = 0
            for fill in range(1, 61):
                given = bytes([fill]) * size
                memory[:size] = given
                client.infer_in_region("copies", size)
                wrong += memory[size:] != given
            took_us = timed_us(lambda: client.infer_in_region("copies", size), 20)
            client.post("/v2/systemsharedmemory/region/check/unregister", b"", json_headers)
    finally:
        path.unlink(missing_ok=True)
    return [
        GpuRow("host", "a client's region of the host: wrong outputs of 60", wrong, ok=not wrong),
        GpuRow("host", f"{size} bytes in a client's region of the host", round(took_us, 1), "µs"),
    ]


# ---- latencies, figures, failures ----------------------------------------------------------------


def latencies(check: GpuCheck, client: RegionClient) -> list[GpuRow]:
    """The latency of a request over the latency of the bare copy, by the rows of the request."""
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
    more = {"calls": "a call of another model", "chain": "another step of an ensemble",
            "calls_chain": "a call of an ensemble of two steps"}  # fmt: skip
    for model, what in more.items():
        path = f"/v2/models/{model}/infer"
        took_us = timed_us(lambda path=path: client.call(path, body), check.requests)  # type: ignore[misc]  # as above
        rows.append(GpuRow("latency", f"{what}, over one request", round(took_us - alone_us, 1), "µs"))
    return rows


def figures(server: ServerProcess) -> list[GpuRow]:
    """What NVML says, as the metrics page shows it."""
    page(server)  # the first page begins to read them
    time.sleep(2.5)
    names = ("nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_power_usage", "nv_energy_consumption")
    lines = page(server)
    found = {
        name: next((line.rsplit(" ", 1)[1] for line in lines if line.startswith(name + "{")), "") for name in names
    }
    there = importlib.util.find_spec("pynvml") is not None
    return [GpuRow("figures", name, value or "not there", ok=bool(value) or not there) for name, value in found.items()]


def killed_in_flight(server: ServerProcess, client: RegionClient) -> list[GpuRow]:
    """Each request has a response, whatever is killed while it runs."""
    body, texts = json.dumps(client.body(1)), list[str]()

    def infer() -> None:
        http = HTTPConnection("127.0.0.1", client.http.port, timeout=60)
        for _ in range(20):
            http.request("POST", "/v2/models/copies/infer", body, {"Content-Type": "application/json"})
            response = http.getresponse()
            text = response.read().decode(errors="replace")
            texts.append("" if response.status == 200 else text)
        http.close()

    threads = [threading.Thread(target=infer) for _ in range(4)]
    for thread in threads:
        thread.start()
    kill_worker(server, "copies")
    for thread in threads:
        thread.join(120)
    errors = [text for text in texts if text]
    whole = len(texts) == 80
    rows = [GpuRow("failures", "responses to 80 requests while the worker is killed", len(texts), ok=whole)]
    return [*rows, GpuRow("failures", "of these errors", f"{len(errors)} {errors[:1]}", ok=len(errors) < 80)]


def kill_worker(server: ServerProcess, model: str) -> None:
    for process in psutil.Process(server.pid).children(recursive=True):
        if _is_of(process, model):
            process.send_signal(signal.SIGKILL)


def _is_of(process: psutil.Process, model: str) -> bool:
    """Whether a process is a worker of a model."""
    return any(word.startswith(f"--model={model}") for word in process.cmdline())


def failures(server: ServerProcess, client: RegionClient) -> list[GpuRow]:
    """A worker that is killed, and a client whose memory goes."""
    rows = []
    kill_worker(server, "copies")
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


# ---- models without a kind -----------------------------------------------------------------------


def kinds(check: GpuCheck) -> list[GpuRow]:
    """Where models run whose configuration does not say it: on a GPU if the backend can compute there as it is
    installed, otherwise on the CPU; Python models on a GPU, as in Triton."""
    source = next((_ROOT / "kernel" / "demo" / "digits").rglob("*.onnx"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in ("onnx", "python"):
            (folder / model / "1").mkdir(parents=True)
        (folder / "onnx" / "1" / "model.onnx").write_bytes(source.read_bytes())
        (folder / "onnx" / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 32\n')
        python = (_CONFIG % 'backend: "python"').replace("instance_group [{ kind: KIND_GPU gpus: 0 }]", "")
        (folder / "python" / "config.pbtxt").write_text(python)
        (folder / "python" / "1" / "model.py").write_text(_PYTHON % ("", "given"))
        can = importlib.util.find_spec("onnxruntime") is not None and "CUDA" in _onnxruntime_providers()
        expected = {"onnx": "KIND_GPU" if can else "KIND_CPU", "python": "KIND_GPU"}
        with ServerProcess(folder, "--exit-on-error=false", start_timeout_s=300) as server:
            http = HTTPConnection("127.0.0.1", server.http_port, timeout=60)
            for model, kind in expected.items():
                http.request("GET", f"/v2/models/{model}/config")
                config = json.loads(http.getresponse().read())
                found = [group["kind"] for group in config.get("instance_group", [])] or config.get(
                    "error", "not loaded"
                )
                check.rows.append(GpuRow("kinds", f"{model} without a kind", str(found), ok=found == [kind]))
            http.close()
    return []


def _onnxruntime_providers() -> str:
    """Return the providers and the version of onnxruntime, which is asked in a process of its own."""
    code = "import onnxruntime as o; print(o.get_available_providers(), o.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return done.stdout.strip()


# ---- ONNX models ---------------------------------------------------------------------------------

_DIGITS = """
backend: "onnxruntime"
max_batch_size: 32
instance_group [{ kind: %s }]
optimization { %s }
"""
_GRAPHS = (
    'execution_accelerators { gpu_execution_accelerator [{ name: "cuda" '
    'parameters { key: "enable_cuda_graph" value: "1" } }] }'
)


def onnx_models(check: GpuCheck) -> list[GpuRow]:
    """The demo's ONNX model on CPU and GPU, with and without CUDA graphs: same outputs, and their latencies."""
    if not importlib.util.find_spec("onnxruntime"):
        return [GpuRow("onnxruntime", "onnxruntime", "not there")]
    available = _onnxruntime_providers()
    check.rows.append(GpuRow("onnxruntime", "providers", available))
    if "CUDAExecutionProvider" not in available:
        return []
    groups = {"digits_cpu": ("KIND_CPU", ""), "digits_gpu": ("KIND_GPU", ""), "digits_graphs": ("KIND_GPU", _GRAPHS)}
    source = next((_ROOT / "kernel" / "demo" / "digits").rglob("*.onnx"))
    with tempfile.TemporaryDirectory() as name:
        for model, settings in groups.items():
            (Path(name) / model / "1").mkdir(parents=True)
            (Path(name) / model / "config.pbtxt").write_text(_DIGITS % settings)
            (Path(name) / model / "1" / "model.onnx").write_bytes(source.read_bytes())
        with ServerProcess(Path(name), "--exit-on-error=false", start_timeout_s=300) as server:
            check.run("onnxruntime", lambda check: onnx_latencies(check, server, list(groups)))
            lines = [line for line in server.log.splitlines() if "without CUDA graph" in line]
    return [GpuRow("onnxruntime", "log", line) for line in lines]


def onnx_latencies(check: GpuCheck, server: ServerProcess, models: list[str]) -> list[GpuRow]:
    http, rows, expected = HTTPConnection("127.0.0.1", server.http_port, timeout=60), list[GpuRow](), dict[int, Any]()

    def post(model: str, body: str) -> Any:
        http.request("POST", f"/v2/models/{model}/infer", body, {"Content-Type": "application/json"})
        response = http.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(text.decode(errors="replace"))
        return [output["data"] for output in json.loads(text)["outputs"]]

    for model in models:
        http.request("GET", f"/v2/models/{model}/config")
        config = json.loads(http.getresponse().read())
        if "input" not in config:
            rows.append(GpuRow("onnxruntime", model, config.get("error", "not loaded"), ok=False))
            continue
        [given] = config["input"]
        width = [int(dim) for dim in given["dims"]]
        for count in (1, 8, 32):
            values = [float(number % 17) for number in range(count * math.prod(width))]
            tensor = {"name": given["name"], "datatype": "FP32", "shape": [count, *width], "data": values}
            body = json.dumps({"inputs": [tensor]})
            found = post(model, body)
            right = all(
                abs(a - b) <= 1e-3 * max(1.0, abs(a))
                for mine, other in zip(expected.setdefault(count, found), found, strict=True)
                for a, b in zip(mine, other, strict=True)
            )
            rows.append(
                GpuRow("onnxruntime", f"{model}: {count} rows as on the CPU", "yes" if right else "no", ok=right)
            )
            took_us = timed_us(lambda model=model, body=body: post(model, body), check.repeats)  # type: ignore[misc]  # a default binds it
            rows.append(GpuRow("onnxruntime", f"{model}: request of {count} rows in JSON", round(took_us, 1), "µs"))
    http.close()
    return rows


# ---- the PyTorch backend -------------------------------------------------------------------------


def pytorch(check: GpuCheck) -> list[GpuRow]:
    """A TorchScript file and an exported program on the GPU: from region to region, with and without a change of the
    input, which must not reach the client's memory."""
    if not importlib.util.find_spec("torch"):
        return [GpuRow("pytorch", "torch", "not there")]
    with tempfile.TemporaryDirectory() as name:
        models = child(["torch models", name])
        if "error" in models:
            return [GpuRow("pytorch", "torch", models["error"])]
        for model in models["names"]:
            (Path(name) / model / "config.pbtxt").write_text(_CONFIG % 'backend: "pytorch"')
        with ServerProcess(Path(name), "--exit-on-error=false", start_timeout_s=300) as server:
            client = RegionClient(server.http_port, 4 * 150_528)
            for model in models["names"]:
                check.run("pytorch", lambda check, model=model: from_region_to_region(server, client, model))  # type: ignore[misc]  # a default binds it
                check.run("pytorch", lambda check, model=model: request_latency(check, client, model))  # type: ignore[misc]  # as above
            client.close()
    return []


def request_latency(check: GpuCheck, client: RegionClient, model: str) -> list[GpuRow]:
    path, body = f"/v2/models/{model}/infer", client.body(1)
    took_us = timed_us(lambda: client.call(path, body), check.repeats)
    return [GpuRow("pytorch", f"{model}: a request from region to region", round(took_us, 1), "µs")]


def torch_models(folder: str) -> dict[str, Any]:
    """Write the models. In another process."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return {"error": "torch has no GPU"}
    sys.path.insert(0, folder)
    (Path(folder) / "torch_sources.py").write_text(_TORCH_SOURCES)
    sources = importlib.import_module("torch_sources")
    for name in ("scripted", "changes", "exported"):
        (Path(folder) / name / "1").mkdir(parents=True)
    torch.jit.script(sources.Plain()).save(f"{folder}/scripted/1/model.pt")
    torch.jit.script(sources.Changes()).save(f"{folder}/changes/1/model.pt")
    shapes = ({0: torch.export.Dim("rows"), 1: torch.export.Dim("width")},)
    program = torch.export.export(sources.Plain(), (torch.ones(2, 8),), dynamic_shapes=shapes)
    torch.export.save(program, f"{folder}/exported/1/model.pt2")
    return {"names": ["scripted", "changes", "exported"]}


_TORCH_SOURCES = """
import torch


class Plain(torch.nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * 1


class Changes(torch.nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        result = given * 1
        given.add_(1)
        return result
"""


# ---- instances in one process, and in a process each --------------------------------------------

#: Launches a graph of small copies on the device, the stand-in for a model: one call, and work that fills no GPU.
_WORKS = """
from backends.base import Backend
from backends.reshape import tensor_specs
from backends.batch_tensors import scatter
from backends.worker.devices.tensors import DeviceArray

class Works(Backend):
    shares_worker = shares_worker_on_gpu = overlaps_on_device = True

    def load(self, arguments):
        self.specs = [tensor_specs(arguments.config, key) for key in ("input", "output")]
        device, size = self.host.device, 1 << 18
        self.blocks = [device.allocate(size) for _ in range(2)]
        first, second = (block.address for block in self.blocks)
        cuda = device.cuda
        self.stream = cuda.stream_of(device.stream)
        cuda.begin_capture(self.stream)
        for _ in range(100):
            cuda.enqueue_copy(first, second, size, self.stream)
        self.graph = cuda.end_capture(self.stream)

    def execute(self, requests, timings):
        device = self.host.device
        given = device.gather(requests, self.specs[0])["IN"]
        timings.inputs_ready()
        device.computes()
        device.keeps_outputs_in_order()
        device.cuda.launch_graph(self.graph, self.stream)
        block = self.blocks[0]
        device.enqueue(block.address, given.address, given.nbytes, crosses=False)
        place = DeviceArray(block.address, "FP32", given.shape, device.device_id, block)
        sizes = [request.inputs[0].shape[0] for request in requests]
        scatter(requests, sizes, {"OUT": place}, self.specs[1])
"""
_WORKS_CONFIG = """
backend: "%s"
max_batch_size: 1
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_GPU gpus: [0] count: %d }]
%s
"""
_SHARED = 'parameters { key: "naiad.worker" value { string_value: "%s" } }'

#: The demo's ONNX model without batches: instances compute at the same time, or one after another.
_DIGITS_INSTANCES = """
backend: "onnxruntime"
max_batch_size: 1
instance_group [{ kind: KIND_GPU gpus: [0] count: %d }]
"""


def streams(check: GpuCheck) -> list[GpuRow]:
    """Instances of one model: throughput, latency in the server, and memory, in a process each and as threads. An ONNX
    model, where onnxruntime can use the GPU, and one that only copies and launches."""
    counts = (2,) if check.quick else (1, 2, 4, 6)
    with tempfile.TemporaryDirectory() as name:
        for count in counts:
            for mode in ("processes", "threads"):
                model = f"{mode}_{count}"
                shared = _SHARED % model if mode == "threads" else ""
                (Path(name) / model / "1").mkdir(parents=True)
                (Path(name) / model / "config.pbtxt").write_text(_WORKS_CONFIG % (model, count, shared))
                (Path(name) / model / "backend.py").write_text(_WORKS)
        for count in counts:
            for mode in ("processes", "threads"):
                check.run("streams", lambda check, model=f"{mode}_{count}": in_streams(check, Path(name), model))  # type: ignore[misc]  # a default binds it
    if importlib.util.find_spec("onnxruntime") and "CUDAExecutionProvider" in _onnxruntime_providers():
        check.run("streams", lambda check: onnx_streams(check, counts))
    return []


def onnx_streams(check: GpuCheck, counts: Sequence[int]) -> list[GpuRow]:
    """The same with instances of an ONNX model, by the flag that decides between both."""
    source = next((_ROOT / "kernel" / "demo" / "digits").rglob("*.onnx"))
    for mode in ("processes", "threads"):
        with tempfile.TemporaryDirectory() as name:
            for count in counts:
                model = f"onnx_{mode}_{count}"
                (Path(name) / model / "1").mkdir(parents=True)
                (Path(name) / model / "config.pbtxt").write_text(_DIGITS_INSTANCES % count)
                (Path(name) / model / "1" / "model.onnx").write_bytes(source.read_bytes())
                in_streams(check, Path(name), model, f"--gpu-instances={mode}", input_name="image", shape=(8, 8))
    return []


def in_streams(
    check: GpuCheck, repository: Path, model: str, *more: str, input_name: str = "IN", shape: tuple[int, ...] = (16,)
) -> list[GpuRow]:
    """Load one of the models alone, so that nothing else is on the GPU, and send it requests of eight clients.

    A model whose input is called IN responds with its input.
    """
    devices, rows = cuda(), check.rows
    free_before = devices.free_and_total(0)[0]
    start = time.perf_counter()
    flags = ("--model-control-mode=explicit", f"--load-model={model}", "--exit-on-error=false", *more)
    with ServerProcess(repository, *flags, start_timeout_s=300) as server:
        rows.append(GpuRow("streams", f"{model}: start of the server", round(time.perf_counter() - start, 2), "s"))
        used = free_before - devices.free_and_total(0)[0]
        rows.append(GpuRow("streams", f"{model}: memory of the GPU", used >> 20, "MiB"))
        wrong, served_count, until = list[str](), [0] * 8, time.monotonic() + (0.5 if check.quick else 4)

        def ask(number: int) -> None:
            count = math.prod(shape)
            client, given = HostClient(server.http_port), struct.pack(f"<{count}f", *[float(number + 1)] * count)
            expected = given if input_name == "IN" else b""
            while time.monotonic() < until:
                try:
                    found = client.infer(model, given, input_name, shape)
                    expected = expected or found
                    if found != expected:
                        wrong.append("another output")
                except (RuntimeError, OSError) as error:
                    wrong.append(str(error))
                    break
                served_count[number] += 1
            client.close()

        start = time.perf_counter()
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        took_s = time.perf_counter() - start
        rows.append(GpuRow("streams", f"{model}: requests", round(sum(served_count) / took_s), "1/s", ok=not wrong))
        if wrong:
            rows.append(GpuRow("streams", f"{model}: first of {len(wrong)} errors", wrong[0], ok=False))
        rows += in_the_server(server, model)
        pinless = [line for line in server.log.splitlines() if "pins no memory" in line]
    rows.append(GpuRow("streams", f"{model}: instances that pin no memory", len(pinless), ok=not pinless))
    return []


def in_the_server(server: ServerProcess, model: str) -> list[GpuRow]:
    """Where the time of requests goes in the server, from its statistics: apart from the client's time."""
    http = HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    http.request("GET", f"/v2/models/{model}/stats")
    [found] = json.loads(http.getresponse().read())["model_stats"]
    http.close()
    rows = []
    for stage in ("queue", "compute_input", "compute_infer", "compute_output"):
        counted = found["inference_stats"][stage]
        mean_us = int(counted["ns"]) / max(1, int(counted["count"])) / 1000
        rows.append(GpuRow("streams", f"{model}: {stage} in the server", round(mean_us, 1), "µs"))
    return rows


# ---- a network of the shape of ResNet-50 ---------------------------------------------------------

#: A network of the shape of ResNet-50 with random weights: what takes the time is right, what it says is not.
_NETWORK = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width_in, width, stride):
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out))
        self.skip = nn.Identity() if width_in == out else nn.Sequential(
            nn.Conv2d(width_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


def network():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width_in = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Block(width_in, width, stride if number == 0 else 1))
            width_in = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*layers).eval().cuda()
"""
_NETWORK_MODEL = """
import torch
import triton_python_backend_utils as pb_utils
from network import network

class TritonPythonModel:
    def initialize(self, args):
        self.network = network()

    def execute(self, requests):
        responses = []
        for request in requests:
            given = torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, "IN"))
            with torch.inference_mode():
                found = self.network(given.reshape(-1, 3, 224, 224))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", found.reshape(-1))]))
        return responses
"""
_NETWORK_CONFIG = """
backend: "python"
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1, -1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_GPU gpus: 0 }]
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }
"""


def network(check: GpuCheck) -> list[GpuRow]:
    """A network of the shape of ResNet-50 in a Python model with torch: latency over the latency of torch alone."""
    if not importlib.util.find_spec("torch"):
        return [GpuRow("network", "torch", "not there")]
    rows = check.rows
    repeats = min(check.repeats, 50)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "network" / "1"
        folder.mkdir(parents=True)
        (folder.parent / "config.pbtxt").write_text(_NETWORK_CONFIG)
        (folder / "model.py").write_text(_NETWORK_MODEL)
        (folder / "network.py").write_text(_NETWORK)
        bare = child(["network", str(folder), str(repeats)])
        if "error" in bare:
            return [GpuRow("network", "torch", bare["error"])]
        for count in (1, 8, 32):
            took_us = network_served(Path(name), count, repeats)
            alone_us = bare[str(count)]
            over = took_us - alone_us
            rows.append(GpuRow("network", f"torch alone, batch {count}", round(alone_us, 1), "µs"))
            rows.append(GpuRow("network", f"over torch alone, batch {count}", round(over, 1), "µs"))
            share = round(100 * over / alone_us, 1)
            limit = 10 if count == 32 else 1000
            rows.append(GpuRow("network", f"over torch alone, batch {count}", share, "%", ok=share <= limit))
    return []


def network_served(repository: Path, count: int, repeats: int) -> float:
    """The latency of a request, in a server of its own: its worker has the memory of one size only."""
    with ServerProcess(repository, start_timeout_s=300) as server:
        client = RegionClient(server.http_port, 4 * 150_528 * count)
        body = client.body(count)
        body["outputs"] = [{"name": "OUT", "parameters": {"shared_memory_region": "out",
                                                          "shared_memory_byte_size": 4000 * count}}]  # fmt: skip
        for _ in range(5):  # libraries choose their kernels
            client.call("/v2/models/network/infer", body)
        took_us = timed_us(lambda: client.call("/v2/models/network/infer", body), repeats)
        client.close()
        return took_us


def network_alone(folder: str, repeats: int) -> dict[str, Any]:
    """The latency of the network without a server, by its batch size. In another process."""
    sys.path.insert(0, folder)
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return {"error": "torch has no GPU"}
    model = importlib.import_module("network").network()
    found = {}
    for count in (1, 8, 32):
        given = torch.zeros(count, 3, 224, 224, device="cuda")

        def run(given: Any = given) -> None:
            with torch.inference_mode():
                model(given)
            torch.cuda.synchronize()

        for _ in range(5):
            run()
        found[str(count)] = timed_us(run, repeats)
    return found


# ---- the command ---------------------------------------------------------------------------------


def be_child(words: list[str]) -> None:
    """What other processes do for a part."""
    if words[0] == "open":
        print(json.dumps(opened_elsewhere(bytes.fromhex(words[1]))))
    elif words[0] == "hold":
        hold(bytes.fromhex(words[1]))
    elif words[0] == "network":
        print(json.dumps(network_alone(words[1], int(words[2]))))
    elif words[0] == "torch models":
        print(json.dumps(torch_models(words[1])))
    elif words[0] == "fork":
        print(json.dumps(forked()))
    elif words[0] == "export":
        devices: Cuda = cuda()
        print(base64.b64encode(devices.export_handle(devices.allocate(4096, 0))).decode(), flush=True)
        sys.stdin.read()


#: In the order of their worth: what is left out when the time is over is worth least.
PARTS: dict[str, Callable[[GpuCheck], list[GpuRow]]] = {
    "machine": machine, "handles": handles, "server": served, "kinds": kinds, "onnxruntime": onnx_models,
    "streams": streams, "ceilings": ceilings, "pinned": pinned, "capabilities": capabilities, "pytorch": pytorch,
    "network": network, "more handles": more_handles,
}  # fmt: skip


def run_part(part: str, flags: list[str], limit_s: float, end_s: float) -> Iterator[GpuRow]:
    """Run a part in a process of its own, and return its rows as they come. It ends after `limit_s` seconds, or at
    `end_s` of the monotonic clock."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        yield GpuRow(part, "not run", "no time is left (--total)", ok=False)
        return
    limit_s = min(limit_s, left_s)
    process = subprocess.Popen([sys.executable, __file__, "--only", part, *flags], stdout=subprocess.PIPE, text=True)
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.kill()

    timer = threading.Timer(limit_s, end)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        try:
            yield msgspec.json.decode(line, type=GpuRow)
        except msgspec.MsgspecError:  # what a library prints
            print(line, end="", file=sys.stderr)
    code = process.wait()
    timer.cancel()
    if late.is_set():
        yield GpuRow(part, "failed", f"it was ended after {limit_s:.0f} s", ok=False)
    elif code:
        yield GpuRow(part, "failed", f"its process ended with {code}", ok=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="What a GPU and this server do on it.")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--quick", action="store_true", help="few repeats and small copies")
    parser.add_argument("--fake", action="store_true", help="on the CUDA of the tests: no figures")
    parser.add_argument(
        "--parts", nargs="+", metavar="PART", choices=PARTS, default=[*PARTS],
        help=f"only some, in this order; all, in the order of their worth: {', '.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument("--total", type=float, default=600, metavar="SECONDS", help="begin no part after this time")
    parser.add_argument("--limit", type=float, default=200, metavar="SECONDS", help="end a part after this time")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fake:
        os.environ[BINDINGS_VARIABLE] = "tests.fake_cuda"
        os.environ["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if arguments.child:
        be_child(arguments.child)
        return 0
    if arguments.only:
        GpuCheck(quick=arguments.quick).run(arguments.only, PARTS[arguments.only])
        return 0
    settings = {
        "quick": arguments.quick,
        "fake": arguments.fake,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    flags = ["--quick"] * arguments.quick + ["--fake"] * arguments.fake
    rows: list[GpuRow] = []
    end_s = time.monotonic() + arguments.total
    for part in arguments.parts:
        for row in run_part(part, flags, arguments.limit, end_s):
            rows.append(row)
            print(f"{'  ' if row.ok else '! '}{row.part:10} {row.what:50} {row.value} {row.unit}", flush=True)
            if arguments.json is not None:  # after each row: what runs this may be ended, too
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                found = {"settings": settings, "rows": rows}
                arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
