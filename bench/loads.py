"""`python -m bench loads`: how many small Python models a server loads and unloads in a second."""

from __future__ import annotations

import http.client
import os
import platform
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.server import ServerProcess
from bench.start import show

#: Models in the repository, as in NVIDIA's test of loads, and how many are loaded at the same time.
MODELS = 32
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


def run(cycles: int = CYCLES) -> None:
    """Load and unload the models in turn over HTTP, one and eight at the same time, and print rates and times."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores, {MODELS} models"
    )
    with tempfile.TemporaryDirectory() as folder:
        for number in range(MODELS):
            write_model(Path(folder), f"m{number}")
        with ServerProcess(Path(folder), "--model-control-mode=explicit") as server:
            _round(server, MODELS, max(AT_ONCE))  # not measured: the zygote starts
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
        names = [f"m{number}" for number in range(own, MODELS, at_once)]
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
    try:
        with open(f"/proc/{pid}/stat") as file:
            ticks = sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
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
