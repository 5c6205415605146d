"""`python -m bench density`: servers with growing numbers of models, ours and Triton in turn, and restarts of workers.

The models are copies of a Python model, of the demo's ONNX model, and of a model that imports torch. Stored are figures
of servers with 1 to 200 models, and how long a model is away after its worker was killed: until the next response,
load of the model included. The table says whether the goals are reached.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import re
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from bench.checkout import ROOT
from bench.contenders import OURS, TRITON
from bench.load import ADD_SUB, BadResponse, Inputs, LoadConnection, LoadNotRun, Spec, run_apart
from bench.machine import TRITON as TRITON_VERSION
from bench.machine import (
    Machine,
    ProcessMemory,
    children_of,
    memory_of,
    this_machine,
)
from bench.models import PYTHON_MODELS, write_python_model
from bench.progress import progress
from bench.server import ServerFailed, ServerProcess, free_ports, wait_for
from bench.triton import NotAvailable, server_root, triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


class Footprint(msgspec.Struct, frozen=True):
    """The memory of a server whose models are loaded. A worker is a process with an instance; Triton's are stubs."""

    #: Of the main process: our kernel, `tritonserver`.
    main: ProcessMemory
    worker_count: int
    #: Medians of the workers, in bytes; 0 without workers.
    worker_private: int
    worker_proportional: int
    #: Of all processes: main process, workers, zygotes, helpers, watchers.
    together: ProcessMemory

    @classmethod
    def of(cls, main: int, workers: Sequence[int], memories: Mapping[int, ProcessMemory]) -> Footprint:
        """Add up the memories of processes by their ids: all processes of a server, `main` and `workers` among them."""
        found = [memories[pid] for pid in workers if pid in memories]
        return cls(
            main=memories[main],
            worker_count=len(found),
            worker_private=round(statistics.median([each.private for each in found] or [0])),
            worker_proportional=round(statistics.median([each.proportional for each in found] or [0])),
            together=sum(memories.values(), ProcessMemory()),
        )


class DensityPoint(msgspec.Struct, frozen=True):
    """A server with `models` copies of one model. `ready_s` is from the command until it takes requests."""

    kind: str
    server: str
    models: int
    ready_s: float
    footprint: Footprint
    #: Requests per second by protocol, when the models are asked in turn.
    rates: dict[str, float]


class Restarts(msgspec.Struct, frozen=True):
    """Kills of the worker of a Python model, in ms: from the kill to the next response, and the part of its load."""

    total_ms: list[float]
    load_ms: list[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.total_ms)

    @property
    def median_load_ms(self) -> float:
        return statistics.median(self.load_ms)


class Density(msgspec.Struct, frozen=True):
    """A whole measurement. `triton` is empty if only our server was measured."""

    machine: Machine
    client: str
    connections: int
    seconds: float
    triton: str
    points: list[DensityPoint]
    restarts: Restarts | None
    #: What was not measured, and why.
    skipped: list[str]


DIGITS = ROOT / "kernel/demo/digits"


class ModelKind(msgspec.Struct, frozen=True):
    """One kind of model."""

    name: str
    title: str
    #: Write a copy into a folder that does not exist yet.
    write: Callable[[Path], None]
    inputs: Inputs
    #: Whether the Triton that is compared with can run it: it has the Python backend only.
    triton: bool
    #: The package that it imports.
    needs: str = ""

    def missing(self) -> str:
        """Return why it cannot be measured here; "" if it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.title}: {self.needs} is not installed"
        return ""


def _python(folder: Path) -> None:
    write_python_model(folder, *PYTHON_MODELS["add_sub"])


def _torch(folder: Path) -> None:
    config, source = PYTHON_MODELS["add_sub"]
    write_python_model(folder, config, f"import torch\n\n\n{source}")


def _digits(folder: Path) -> None:
    shutil.copytree(DIGITS, folder)


_SKLEARN_CONFIG = """\
backend: "sklearn"
max_batch_size: 1024
dynamic_batching {}
input [{ name: "input" data_type: TYPE_FP32 dims: [ 16 ] }]
"""


def _sklearn(folder: Path, more: str = "") -> None:
    """Write a pipeline that is fitted with the same numbers each time. Its outputs are completed from the file."""
    import numpy as np  # with scikit-learn it takes a second to import, and only this kind needs it
    import skops.io
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows = np.random.default_rng(0).random((200, 16))
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, rows[:, 0] > 0.5)
    (folder / "1").mkdir(parents=True)
    skops.io.dump(model, folder / "1" / "model.skops")
    (folder / "config.pbtxt").write_text(_SKLEARN_CONFIG + more)


def _sklearn_in_one_process(folder: Path) -> None:
    _sklearn(folder, 'parameters { key: "naiad.worker" value { string_value: "small" } }\n')


KINDS = [
    ModelKind("python", "Python add_sub", _python, ADD_SUB, triton=True),
    ModelKind("onnx", "ONNX digits", _digits, Inputs(("image",), (1, 8, 8)), triton=False),
    ModelKind("torch", "Python with torch", _torch, ADD_SUB, triton=True, needs="torch"),
    ModelKind("sklearn", "scikit-learn pipeline", _sklearn, Inputs(("input",), (1, 16)), triton=False, needs="skops"),
    ModelKind(
        "sklearn in one process",
        "scikit-learn pipeline, all in one process (naiad.worker)",
        _sklearn_in_one_process,
        Inputs(("input",), (1, 16)),
        triton=False,
        needs="skops",
    ),
]


def model_name(number: int) -> str:
    """Return the name of a copy."""
    return f"model_{number:03}"


def write_copies(repository: Path, kind: ModelKind, count: int) -> list[str]:
    """Write `count` copies into the repository; returns their names."""
    names = [model_name(number) for number in range(count)]
    for name in names:
        kind.write(repository / name)
    return names


_LOADED = re.compile(r"is ready again, loaded in ([0-9.]+) s")


def measure_restarts(repository: Path, count: int) -> Restarts:
    """Kill the worker of a Python model `count` times. Raises `ServerFailed`, `BadResponse`.

    Between two kills a request is served, so that the pause before a restart does not grow.
    """
    write_copies(repository, KINDS[0], 1)
    total_ms: list[float] = []
    with ServerProcess(repository) as server:
        _ask_until_served(server)
        for number in range(count):
            worker = next(iter(server.workers()))
            began = time.perf_counter()
            os.kill(worker, signal.SIGKILL)
            _ask_until_served(server)
            total_ms.append((time.perf_counter() - began) * 1e3)
            wait_for(lambda expected=number + 1: len(_LOADED.findall(server.log)) == expected)  # type: ignore[misc]  # bound now
        load_ms = [float(seconds) * 1e3 for seconds in _LOADED.findall(server.log)]
    return Restarts(total_ms, load_ms)


def _ask_until_served(server: ServerProcess) -> None:
    """Send requests one after the other until one is served: the one that the worker has begun is lost with it."""
    while True:
        connection = LoadConnection(Spec("http", server.http_port, 1, [model_name(0)], 0, server.pid), 0)
        try:
            with contextlib.suppress(BadResponse, http.client.HTTPException):
                connection.exchange()
                return
        finally:
            connection.socket.close()


COUNTS, QUICK_COUNTS = (1, 10, 40, 100, 200), (1, 10, 40)

PROTOCOLS = ("http", "grpc")

#: Enough to keep two cores busy. Each has one request in flight, and asks the models in turn.
CONNECTIONS = 16

SECONDS, QUICK_SECONDS = 2.0, 1.0

#: Kills of a worker.
RESTARTS, QUICK_RESTARTS = 50, 10

#: What a server may take until it is ready: Triton took 0.45 s for each Python model on two cores.
START_TIMEOUT_S = 300

#: Both servers' default, written out.
_FLAGS = ("--model-load-thread-count=4",)

#: Triton's Python backend starts a process of this name for each instance.
_STUB = "triton_python_b"


class Served:
    """A server whose models are loaded: its process, its workers, its ports, and when it was ready."""

    def __init__(self, pid: int, workers: Sequence[int], ports: dict[str, int], ready_s: float) -> None:
        self.pid = pid
        self.workers = workers
        self.ports = ports
        self.ready_s = ready_s

    def footprint(self) -> Footprint:
        """Read the memory of all its processes."""
        memories: dict[int, ProcessMemory] = {}
        for pid in (self.pid, *children_of(self.pid)):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                memories[pid] = memory_of(pid)
        return Footprint.of(self.pid, self.workers, memories)


@contextlib.contextmanager
def _ours(repository: Path) -> Iterator[Served]:
    began = time.perf_counter()
    with ServerProcess(repository, *_FLAGS, start_timeout_s=START_TIMEOUT_S) as server:
        ready_s = time.perf_counter() - began
        yield Served(server.pid, list(server.workers()), {"http": server.http_port, "grpc": server.grpc_port}, ready_s)


@contextlib.contextmanager
def _triton(repository: Path) -> Iterator[Served]:
    http_port, grpc_port, metrics_port = free_ports(3)
    began = time.perf_counter()
    with triton(repository, http_port, grpc_port, metrics_port, *_FLAGS, start_timeout_s=START_TIMEOUT_S) as pid:
        ready_s = time.perf_counter() - began
        stubs = [each for each in children_of(pid) if _command_of(each) == _STUB]
        yield Served(pid, stubs, {"http": http_port, "grpc": grpc_port}, ready_s)


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


SERVERS = {OURS: _ours, TRITON: _triton}


def measure(*, quick: bool, with_triton: bool, only: str = "") -> Density:
    """Measure everything: in about 15 minutes, or in 3 minutes if `quick` (fewer models, one short load).

    With `only`, kinds of models whose name does not contain it are left out.
    """
    machine, skipped = this_machine(), list[str]()
    counts, seconds = (QUICK_COUNTS, QUICK_SECONDS) if quick else (COUNTS, SECONDS)
    if with_triton:
        try:
            server_root()
        except NotAvailable as error:
            skipped.append(f"Triton: {error}")
            with_triton = False
    kinds = [kind for kind in KINDS if only in kind.name]
    skipped += [reason for kind in kinds if (reason := kind.missing())]
    kinds = [kind for kind in kinds if not kind.missing()]
    if with_triton:
        skipped += [f"{kind.title} on Triton: it has the Python backend only" for kind in kinds if not kind.triton]
    steps = [
        (kind, count, name)
        for kind in kinds
        for count in counts
        for name in (OURS, *([TRITON] if with_triton and kind.triton else []))
    ]
    points: list[DensityPoint] = []
    with progress() as shown, tempfile.TemporaryDirectory(prefix="naiad-bench-") as temporary:
        bar = shown.add_task("starting", total=len(steps) + 1)
        for kind, count, name in steps:
            shown.update(bar, description=f"{kind.title} x {count}, {name}")
            try:
                points.append(_point(kind, count, name, Path(temporary, "models"), seconds))
            except (NotAvailable, ServerFailed, LoadNotRun) as error:
                skipped.append(f"{kind.title} x {count}, {name}: {error}")
            shown.advance(bar)
        shown.update(bar, description="restarts of a worker")
        restarts = None
        try:
            restarts = measure_restarts(Path(temporary, "restarted"), QUICK_RESTARTS if quick else RESTARTS)
        except (ServerFailed, TimeoutError) as error:
            skipped.append(f"restarts: {error}")
    return Density(
        machine=machine,
        client="bench/load.py",
        connections=CONNECTIONS,
        seconds=seconds,
        triton=TRITON_VERSION if with_triton else "",
        points=points,
        restarts=restarts,
        skipped=skipped,
    )


def _point(kind: ModelKind, count: int, server: str, repository: Path, seconds: float) -> DensityPoint:
    """Start a server over `count` models, read its memory, and ask the models in turn."""
    shutil.rmtree(repository, ignore_errors=True)
    names = write_copies(repository, kind, count)
    with SERVERS[server](repository) as served:
        footprint = served.footprint()
        rates = {
            protocol: run_apart(
                Spec(protocol, served.ports[protocol], CONNECTIONS, names, seconds, served.pid, kind.inputs)
            ).rate
            for protocol in PROTOCOLS
        }
    return DensityPoint(kind.name, server, count, served.ready_s, footprint, rates)


MIB = 1 << 20


def print_table(density: Density) -> None:
    """Print all points, the restarts, and what was left out."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    titles = {kind.name: kind.title for kind in KINDS}
    table = Table(title="Many models", caption=density.machine.line)
    for name in ("models", "server", "ready, s", "workers", "a worker, private", "a worker, proportional",
                 "main process", "all, proportional", "HTTP/s", "gRPC/s"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("models", "server") else "right", no_wrap=True)
    for point in density.points:
        footprint = point.footprint
        table.add_row(
            f"{point.models} x {titles.get(point.kind, point.kind)}", point.server, f"{point.ready_s:.2f}",
            str(footprint.worker_count), mib(footprint.worker_private), mib(footprint.worker_proportional),
            mib(footprint.main.proportional), mib(footprint.together.proportional),
            *(f"{point.rates.get(protocol, 0):,.0f}" for protocol in ("http", "grpc")),
        )  # fmt: skip
    console.print(table)
    for line in (*ratios(density.points), *_restart_lines(density), *(f"left out: {each}" for each in density.skipped)):
        console.print(line, highlight=False)


def mib(byte_size: int) -> str:
    """Return a size as text; empty for none."""
    return f"{byte_size / MIB:.1f} MiB" if byte_size else ""


def ratios(points: Sequence[DensityPoint]) -> list[str]:
    """Return a line for each point that both servers have: our time and memory as a part of Triton's."""
    theirs = {(point.kind, point.models): point for point in points if point.server == TRITON}
    lines: list[str] = []
    for ours in points:
        triton = theirs.get((ours.kind, ours.models))
        if ours.server != OURS or triton is None:
            continue
        time = ours.ready_s / triton.ready_s
        memory = ours.footprint.together.proportional / triton.footprint.together.proportional
        lines.append(
            f"{ours.models} x {ours.kind}: ready in {time:.2f} of Triton's time, with {memory:.2f} of its memory"
        )
    return lines


def _restart_lines(density: Density) -> list[str]:
    restarts = density.restarts
    if restarts is None:
        return []
    return [
        f"restart of a killed worker: {restarts.median_ms:.1f} ms until the next response, of which the load of the "
        f"model took {restarts.median_load_ms:.1f} ms (medians of {len(restarts.total_ms)})"
    ]
