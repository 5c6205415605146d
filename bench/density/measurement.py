"""Measures servers with growing numbers of models, ours and Triton in turn, and the restarts of a worker of ours."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contenders import OURS, TRITON
from bench.density.figures import Density, DensityPoint, Footprint
from bench.density.kinds import KINDS, write_copies
from bench.density.restarts import measure_restarts
from bench.load import LoadNotRun, Spec, run_apart
from bench.machine import TRITON as TRITON_VERSION
from bench.machine import children_of, this_machine
from bench.process_memory import memory_of
from bench.progress import progress
from bench.server import ServerFailed, ServerProcess, free_ports
from bench.triton import NotAvailable, server_root, triton

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.density.kinds import ModelKind
    from bench.process_memory import ProcessMemory

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
