"""How long a server, its models and its workers take to start, and how much memory a server uses.

- `python -m bench start`: the start of a server, and its memory.
- `python -m bench loads`: how many small Python models a server loads and unloads in a second.
- `python -m bench restart`: how long a model takes no requests after its only worker was killed.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import re
import shutil
import signal
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from bench.checkout import ROOT
from bench.load import LoadConnection, Spec
from bench.machine import ProcessMemory, memory_of, stat_fields
from bench.models import copy_name, write_growing_models
from bench.server import ServerProcess
from kernel.options import DEMO_REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5

MIB = 1 << 20

#: Requests over each protocol before the memory of the kernel is read a second time.
REQUESTS = 1000


KINDS: dict[str, Callable[[ProcessMemory], int]] = {
    "private": lambda memory: memory.private,
    "proportional": lambda memory: memory.proportional,
}


def run() -> None:
    """Start the demo server several times, and print medians with the smallest and largest values.

    The byte code of all modules is written before, by a start that does not count.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with ServerProcess(None):
        pass
    seconds: list[float] = []
    memories: dict[str, list[ProcessMemory]] = {}
    for _ in range(ROUNDS):
        started = time.perf_counter()
        with ServerProcess(None) as server:
            seconds.append(time.perf_counter() - started)
            memories.setdefault("kernel", []).append(memory_of(server.pid))
            for pid, name in server.workers().items():
                memories.setdefault(f"worker {name}", []).append(memory_of(pid))
        title = f"kernel after {REQUESTS} requests over each protocol"
        memories.setdefault(title, []).append(_after_requests())
    cores = len(os.sched_getaffinity(0))
    print(
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores, {ROUNDS} starts"
    )
    print(f"{'ready after':66} {show(seconds)} s")
    for name, found in sorted(memories.items()):
        for kind, value in KINDS.items():
            print(f"{f'{kind} memory, {name}':66} {show([value(each) / MIB for each in found])} MiB")


def _after_requests() -> ProcessMemory:
    """Return the memory of a kernel that has served requests, one after the other, over each protocol."""
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as temporary:
        write_growing_models(Path(temporary), 1, ())
        demo = f"--model-repository={ROOT / 'kernel/demo'}"
        with ServerProcess(Path(temporary), demo) as server:
            for protocol, port in (("http", server.http_port), ("grpc", server.grpc_port)):
                connection = LoadConnection(Spec(protocol, port, 1, [copy_name(0)], 0, server.pid), 0)
                try:
                    for _ in range(REQUESTS):
                        connection.exchange()
                finally:
                    connection.socket.close()
            return memory_of(server.pid)


def show(values: list[float]) -> str:
    """Return the median with the smallest and largest value, as text."""
    return f"{statistics.median(values):8.2f}  ({min(values):.2f} to {max(values):.2f})"


#: Models in the repository, as in NVIDIA's test of loads, and how many are loaded at the same time.
LOADED_MODELS = 32

AT_ONCE = (1, 8)

#: Loads with unloads in a round.
CYCLES = 512

_CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""

_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each)]) for each in given]
"""


def measure_loads(cycles: int = CYCLES) -> None:
    """Load and unload the models in turn over HTTP, one and eight at the same time, and print rates and times."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores, "
        f"{LOADED_MODELS} models"
    )
    with tempfile.TemporaryDirectory() as folder:
        for number in range(LOADED_MODELS):
            write_model(Path(folder), f"m{number}")
        with ServerProcess(Path(folder), "--model-control-mode=explicit") as server:
            _round(server, LOADED_MODELS, max(AT_ONCE))  # not measured: the zygote starts
            for at_once in AT_ONCE:
                before_s = _cpu_s(server.pid)
                took_s, loads_ms, unloads_ms = _round(server, cycles, at_once)
                cpu_ms = (_cpu_s(server.pid) - before_s) * 1000 / cycles
                print(f"{at_once} at once: {cycles / took_s:7.0f} loads with unloads per second")
                print(f"  CPU time of all processes: {cpu_ms:.1f} ms for each")
                print(f"  a load:   {show(loads_ms)} ms")
                print(f"  an unload: {show(unloads_ms)} ms")


def write_model(repository: Path, name: str) -> None:
    """Write a Python model that returns its input."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(_CONFIG)
    (folder / "model.py").write_text(_MODEL)


def _round(server: ServerProcess, cycles: int, at_once: int) -> tuple[float, list[float], list[float]]:
    """Return how long `cycles` took, in seconds, and each load and unload in milliseconds."""
    loads_ms: list[float] = []
    unloads_ms: list[float] = []
    left = iter(range(cycles))
    lock = threading.Lock()

    def client(own: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        names = [f"m{number}" for number in range(own, LOADED_MODELS, at_once)]
        done = 0
        while True:
            with lock:
                if next(left, None) is None:
                    break
            name = names[done % len(names)]
            done += 1
            loads_ms.append(_post(connection, name, "load"))
            unloads_ms.append(_post(connection, name, "unload"))
        connection.close()

    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        for each in [pool.submit(client, own) for own in range(at_once)]:
            each.result()
    return time.perf_counter() - started, loads_ms, unloads_ms


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of all that it has started, in seconds. One that has just ended counts 0:
    a few milliseconds, which its parent has from then on."""
    ticks = sum(map(int, stat_fields(pid)[11:15]))
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = file.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return ticks / os.sysconf("SC_CLK_TCK") + sum(_cpu_s(int(child)) for child in children)


def _post(connection: http.client.HTTPConnection, name: str, action: str) -> float:
    started = time.perf_counter()
    connection.request("POST", f"/v2/repository/models/{name}/{action}")
    response = connection.getresponse()
    text = response.read()
    if response.status != 200:
        raise RuntimeError(f"{action} of {name}: {text.decode(errors='replace')}")
    return (time.perf_counter() - started) * 1000


RESTARTS = 50

#: Between two requests that fail, in seconds.
_PAUSE_S = 0.0005

_LOADED = re.compile(r"is ready again, loaded in ([0-9.]+) s")

_VECTOR = {"datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}

_REQUEST = json.dumps({"inputs": [{"name": name, **_VECTOR} for name in ("INPUT0", "INPUT1")]})


def measure_restarts() -> None:
    """Kill the worker of the demo's Python model again and again, forked and spawned, and print medians and ranges."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores, {RESTARTS} kills"
    )
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(DEMO_REPOSITORY / "add_sub", Path(folder, "add_sub"))
        for start in ("fork", "spawn"):
            with ServerProcess(Path(folder), f"--worker-start={start}") as server:
                away = [_away_ms(server) for _ in range(RESTARTS)]
                loads = [float(found) * 1000 for found in _LOADED.findall(server.log)]
            print(f"{start + ': from the kill to a response':40} {show(away)} ms")
            print(f"{start + ': of that, loading the model':40} {show(loads)} ms")
            print(f"{start + ': the rest, by medians':40} {statistics.median(away) - statistics.median(loads):8.2f} ms")


def _away_ms(server: ServerProcess) -> float:
    """Kill the worker, and return the time until a request gets its response from the next one, in milliseconds."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    [worker] = server.workers()
    started = time.perf_counter()
    os.kill(worker, signal.SIGKILL)
    while not _infer(connection):
        time.sleep(_PAUSE_S)
    away_ms = (time.perf_counter() - started) * 1000
    connection.close()
    return away_ms


def _infer(connection: http.client.HTTPConnection) -> bool:
    """Send a request; returns whether it succeeded. One that comes before the next worker waits for it."""
    connection.request("POST", "/v2/models/add_sub/infer", _REQUEST)
    response = connection.getresponse()
    response.read()
    return response.status == 200
