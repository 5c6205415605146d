"""`python -m bench restart`: how long a model takes no requests after its only worker was killed."""

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
import time
from pathlib import Path

from bench.server import ServerProcess
from bench.start import show
from kernel.options import DEMO_REPOSITORY

ROUNDS = 50

#: Between two requests that fail, in seconds.
_PAUSE_S = 0.0005

_LOADED = re.compile(r"is ready again, loaded in ([0-9.]+) s")

_VECTOR = {"datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}
_REQUEST = json.dumps({"inputs": [{"name": name, **_VECTOR} for name in ("INPUT0", "INPUT1")]})


def run() -> None:
    """Kill the worker of the demo's Python model again and again, forked and spawned, and print medians and ranges."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores, {ROUNDS} kills"
    )
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(DEMO_REPOSITORY / "add_sub", Path(folder, "add_sub"))
        for start in ("fork", "spawn"):
            with ServerProcess(Path(folder), f"--worker-start={start}") as server:
                away = [_away_ms(server) for _ in range(ROUNDS)]
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
