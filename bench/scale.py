"""`python -m bench scale`: processor time for each request, with and without processes for front doors.

One server for each number of front doors. They are loaded in turns, in another order in each round, by wrk over HTTP
and by h2load over gRPC, with 32 connections or four of many streams. Figures are medians of the rounds. Servers do not
poll: that would count as work.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
import statistics
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from bench.light import MODEL_INFER, LightLoad, LightRequest, missing, run_load
from bench.server import ServerProcess
from protocols.grpc.framing import PREFIX
from protocols.grpc.generated import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MODEL = "echo"

CONFIG = """backend: "identity"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
dynamic_batching { }
"""

BINARY, _JSON, _GRPC = "binary", "JSON", "gRPC"


class _Load(msgspec.Struct, frozen=True):
    """How many elements of FP32 a request has, in which form, and how many there are at a time."""

    elements: int
    form: str
    connections: int = 32
    #: Of each connection.
    streams: int = 1

    @property
    def protocol(self) -> str:
        return "grpc" if self.form == _GRPC else "http"


_LOADS = {
    "16 floats, binary": _Load(16, BINARY),
    "16 floats, JSON": _Load(16, _JSON),
    "16,384 floats, JSON": _Load(16_384, _JSON),
    "1 MiB, binary": _Load(262_144, BINARY),
    "16 floats, gRPC": _Load(16, _GRPC),
    "16 floats, gRPC, 4 channels of 16 calls": _Load(16, _GRPC, 4, 16),
    "1 MiB, gRPC": _Load(262_144, _GRPC),
}


class Cost(msgspec.Struct, frozen=True):
    """What a request costs, in microseconds of processor time, and how many a second there were."""

    kernel_us: float
    #: Of all front doors together.
    doors_us: float
    workers_us: float
    rate: float


def request_of(count: int, form: str) -> LightRequest:
    """Return a request with `count` floats."""
    values = [number % 100 + 0.5 for number in range(count)]
    if form == _GRPC:
        octets = struct.pack(f"<{count}f", *values)
        given = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[count])
        message = pb.ModelInferRequest(model_name=MODEL, inputs=[given], raw_input_contents=[octets])
        body = message.SerializeToString()
        return LightRequest(MODEL_INFER, PREFIX.pack(0, len(body)) + body)
    tensor: dict[str, object] = {"name": "IN", "shape": [count], "datatype": "FP32"}
    path = f"/v2/models/{MODEL}/infer"
    if form == _JSON:
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

    def cost(self, request: LightRequest, wanted: _Load, seconds: int) -> Cost:
        """Load the server. Raises `RuntimeError` for a load that has failed."""
        groups = ([self.kernel], self.doors, self.workers)
        before = [cpu_s(group) for group in groups]
        port = self.server.grpc_port if wanted.form == _GRPC else self.server.http_port
        load = LightLoad(
            wanted.protocol, port, request, wanted.connections, wanted.streams, seconds,
            response_byte_size=4 * wanted.elements if wanted.form == _GRPC else 0,
        )  # fmt: skip
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
    """Return the medians, by the name of the load and the number of front doors. Raises `RuntimeError`.

    Loads whose name does not contain `only` are left out.
    """
    loads = {name: load for name, load in _LOADS.items() if only in name}
    for problem in {missing(load.protocol) for load in loads.values()} - {""}:
        raise RuntimeError(problem)
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
        for name, load in loads.items():
            request = request_of(load.elements, load.form)
            cost = functools.partial(_Measured.cost, request=request, wanted=load)
            costs = in_turns(servers, rounds, seconds, cost)
            found[name] = {count: median(each) for count, each in costs.items()}
    return found


_Key = TypeVar("_Key")
_Server = TypeVar("_Server")
_Figures = TypeVar("_Figures")


def in_turns(
    servers: Mapping[_Key, _Server], rounds: int, seconds: int, cost: Callable[..., _Figures]
) -> dict[_Key, list[_Figures]]:
    """Return `cost(server, seconds=seconds)` of each server for each round, in another order in each of them.

    Before, each server has a second that is not counted: it prepares things at its first requests.
    """
    found: dict[_Key, list[_Figures]] = {key: [] for key in servers}
    for server in servers.values():
        cost(server, seconds=1)
    for _ in range(rounds):
        for key in random.sample(list(servers), len(servers)):
            found[key].append(cost(servers[key], seconds=seconds))
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
