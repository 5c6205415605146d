"""`python -m bench scale`: processor time for each request over HTTP, with and without processes for front doors.

One server for each number of front doors. They are loaded in turns, in another order in each round, by wrk with 32
connections. Figures are medians of the rounds. Servers do not poll: that would count as work.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import statistics
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from bench.light import LightLoad, LightRequest, run_load
from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONNECTIONS = 32

MODEL = "echo"

CONFIG = """backend: "identity"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
dynamic_batching { }
"""

#: Name → elements of FP32, and whether they are binary.
_LOADS = {
    "16 floats, binary": (16, True),
    "16 floats, JSON": (16, False),
    "16,384 floats, JSON": (16_384, False),
    "1 MiB, binary": (262_144, True),
}


class Cost(msgspec.Struct, frozen=True):
    """What a request costs, in microseconds of processor time, and how many a second there were."""

    kernel_us: float
    #: Of all front doors together.
    doors_us: float
    workers_us: float
    rate: float


def request_of(count: int, *, binary: bool) -> LightRequest:
    """Return a request with `count` floats."""
    values = [number % 100 + 0.5 for number in range(count)]
    tensor: dict[str, object] = {"name": "IN", "shape": [count], "datatype": "FP32"}
    path = f"/v2/models/{MODEL}/infer"
    if not binary:
        return LightRequest(path, json.dumps({"inputs": [{**tensor, "data": values}]}).encode())
    data = struct.pack(f"<{count}f", *values)
    tensor["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return LightRequest(path, head + data, {"Inference-Header-Content-Length": str(len(head))})


def median(costs: Sequence[Cost]) -> Cost:
    """Return the median of each figure."""
    return Cost(*(statistics.median(getattr(each, name) for each in costs) for name in Cost.__struct_fields__))


class _Measured:
    """A server with a number of front doors, and its processes."""

    def __init__(self, server: ServerProcess, doors: int) -> None:
        for number in range(1, doors + 1):
            server.wait_for_log(f"front door {number} takes connections")
        self.server = server
        self.kernel = psutil.Process(server.pid)
        titles = {each: " ".join(each.cmdline()) for each in self.kernel.children()}
        self.doors = [each for each, title in titles.items() if re.search(r"--model=front door \d", title)]
        self.workers = [each for each, title in titles.items() if f"--model={MODEL}" in title]

    def cost(self, request: LightRequest, seconds: int) -> Cost:
        """Load the server. Raises `RuntimeError` for a load that has failed."""
        groups = ([self.kernel], self.doors, self.workers)
        before = [cpu_s(group) for group in groups]
        load = LightLoad("http", self.server.http_port, request, _CONNECTIONS, seconds=seconds)
        figures = run_load(load)
        if isinstance(figures, str):
            raise RuntimeError(figures)
        kernel, doors, workers = (
            1e6 * (cpu_s(group) - start) / figures.requests for group, start in zip(groups, before, strict=True)
        )
        return Cost(kernel, doors, workers, figures.rate)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for each in processes for times in [each.cpu_times()])


def measure(doors: Sequence[int], rounds: int, seconds: int, only: str = "") -> dict[str, dict[int, Cost]]:
    """Return the medians, by the name of the load and the number of front doors. Raises `RuntimeError`."""
    found: dict[str, dict[int, Cost]] = {}
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary) / MODEL
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(CONFIG)
        servers = {
            count: _Measured(
                stack.enter_context(
                    ServerProcess(Path(temporary), "--busy-poll-us=0", f"--front-door-processes={count}")
                ),
                count,
            )
            for count in doors
        }
        for name, (elements, binary) in _LOADS.items():
            if only not in name:
                continue
            request = request_of(elements, binary=binary)
            costs: dict[int, list[Cost]] = {count: [] for count in doors}
            for server in servers.values():
                server.cost(request, 1)  # what is prepared at the first requests
            for _ in range(rounds):
                for count in random.sample(list(doors), len(doors)):
                    costs[count].append(servers[count].cost(request, seconds))
            found[name] = {count: median(each) for count, each in costs.items()}
    return found


def run(doors: Sequence[int], rounds: int, seconds: int, only: str = "") -> None:
    """Measure, and print the table."""
    table = Table("request", "front doors", "kernel µs", "doors µs", "worker µs", "requests/s")
    for name, by_doors in measure(doors, rounds, seconds, only).items():
        for count, cost in by_doors.items():
            table.add_row(
                name, str(count), f"{cost.kernel_us:.1f}", f"{cost.doors_us:.1f}", f"{cost.workers_us:.1f}",
                f"{cost.rate:,.0f}",
            )  # fmt: skip
    Console().print(table)
