"""`python -m bench curve`: latency and throughput by the size of a tensor, for each way to transport it.

The model is an identity, the same Python file on both servers. The client is NVIDIA's perf_analyzer, because a client
of our own could favour our server. Each round measures every point, so a drift of the machine moves whole curves and
makes no kinks in them.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from bench.contenders import OURS, TRITON, Contender, contenders
from bench.machine import PERF_ANALYZER, Machine, this_machine
from bench.machine import TRITON as TRITON_VERSION
from bench.models import write_python_models
from bench.progress import progress
from bench.rows import Analyzer, Figures, Row
from bench.triton import perf_analyzer

if TYPE_CHECKING:
    from collections.abc import Sequence

KIB, MIB = 1 << 10, 1 << 20
MODEL = "identity"

#: One client for the latency, and for the throughput as many as two cores can serve.
LATENCY_CLIENTS, THROUGHPUT_CLIENTS = 1, 4

SIZES = [KIB * 4**step for step in range(9)]  # 1 KiB to 64 MiB
ROUNDS = 3


class Transport(msgspec.Struct, frozen=True):
    """A way to transport a tensor to the server and back: its name in pictures, its protocol, and its largest size."""

    name: str
    protocol: str
    largest: int


JSON, SHARED_MEMORY = "JSON", "shared memory"
TRANSPORTS = [
    # A number of 4 bytes takes 20 bytes as text. Above 1 MiB a request takes seconds, and windows would take minutes.
    Transport(JSON, "http", MIB),
    Transport("HTTP, binary", "http", SIZES[-1]),
    Transport("gRPC", "grpc", SIZES[-1]),
    Transport(SHARED_MEMORY, "grpc", SIZES[-1]),
]


#: Length of a window by the bytes that are in flight at once: each window must see several requests, because a window
#: without a completed request is an error for perf_analyzer. A round has three windows, and takes 1.2 times their sum.
_WINDOWS_S = ((4 * MIB, 0.15), (16 * MIB, 0.4), (64 * MIB, 0.6))
_LONGEST_WINDOW_S = 1.0
_SLOWNESS = {JSON: 12, SHARED_MEMORY: 1 / 16}


class CurveLoad(msgspec.Struct, frozen=True):
    """One point of the picture before the measurement."""

    transport: Transport
    byte_size: int
    clients: int

    def row(self, folder: Path) -> Row:
        """Return the load for perf_analyzer. The input of JSON requests is written to `folder`."""
        extra: tuple[str, ...] = ("--shape", f"INPUT0:{self.byte_size // 4}")
        if self.transport.name == JSON:
            # By default it sends random bytes, of which one number in 256 is infinite or not a number.
            data = _numbers(folder, self.byte_size // 4)
            extra += ("--input-data", str(data), "--input-tensor-format", "json", "--output-tensor-format", "json")
        elif self.transport.name == SHARED_MEMORY:
            extra += ("--shared-memory", "system", "--output-shared-memory-size", str(self.byte_size))
        return Row(self.name, MODEL, self.transport.protocol, self.clients, extra)

    @property
    def name(self) -> str:
        return f"{self.transport.name} {size_name(self.byte_size)} c={self.clients}"

    @property
    def window_s(self) -> float:
        """Length of a window in seconds."""
        work = self.byte_size * self.clients * _SLOWNESS.get(self.transport.name, 1)
        return next((window_s for most, window_s in _WINDOWS_S if work <= most), _LONGEST_WINDOW_S)


def _numbers(folder: Path, count: int) -> Path:
    """Return a file with `count` numbers between -1 and 1 in perf_analyzer's format. The numbers never change."""
    path = folder / f"numbers-{count}.json"
    if not path.exists():
        random_numbers = random.Random(count)
        content = [random_numbers.uniform(-1, 1) for _ in range(count)]
        path.write_text(json.dumps({"data": [{"INPUT0": {"content": content, "shape": [count]}}]}))
    return path


class CurvePoint(msgspec.Struct, frozen=True):
    """One measured point: medians of the rounds, and every round. Rates are requests per second."""

    transport: str
    server: str
    byte_size: int
    clients: int
    rate: float
    p50_us: float
    p99_us: float
    rounds: list[Figures]

    @property
    def bytes_per_s(self) -> float:
        """Bytes of tensors in one direction; the same number comes back."""
        return self.rate * self.byte_size


class Curve(msgspec.Struct, frozen=True):
    """A whole measurement, as it is stored. `triton` is empty if only our server was measured."""

    machine: Machine
    client: str
    rounds: int
    triton: str
    points: list[CurvePoint]
    failures: list[str] = []


def loads(sizes: Sequence[int]) -> list[CurveLoad]:
    """Return every load of a round, in the order in which they are measured."""
    return [
        CurveLoad(transport, size, clients)
        for clients in (LATENCY_CLIENTS, THROUGHPUT_CLIENTS)
        for transport in TRANSPORTS
        for size in sizes
        if size <= transport.largest
    ]


def measure(*, quick: bool, with_triton: bool) -> Curve:
    """Measure everything in about 7 minutes, or in 1.5 minutes if `quick` (every other size, one round)."""
    analyzer = Analyzer(*perf_analyzer())
    machine = this_machine()
    rounds = 1 if quick else ROUNDS
    todo = loads(SIZES[::2] if quick else SIZES)
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as temporary:
        folder = Path(temporary)
        repository = folder / "models"
        write_python_models(repository)
        with contenders(repository, repository if with_triton else None) as servers:
            rows = [(load, load.row(folder)) for load in todo]
            points, failures = _measure_all(analyzer, rows, servers, rounds)
    return Curve(
        machine=machine,
        client=f"perf_analyzer {PERF_ANALYZER}",
        rounds=rounds,
        triton=TRITON_VERSION if len(servers) > 1 else "",
        points=points,
        failures=failures,
    )


def _measure_all(
    analyzer: Analyzer, rows: list[tuple[CurveLoad, Row]], servers: list[Contender], rounds: int
) -> tuple[list[CurvePoint], list[str]]:
    found: dict[tuple[CurveLoad, str], list[Figures]] = {(load, each.name): [] for load, _ in rows for each in servers}
    failures: list[str] = []
    with progress() as shown:
        bar = shown.add_task("starting", total=len(found) * rounds)
        for load, row in rows * rounds:
            for server in servers:
                name = f"{load.name}, {server.name}"
                shown.update(bar, description=name)
                figures = _figures(analyzer, load, row, server)
                if isinstance(figures, str):
                    failures.append(f"{name}: {figures}")
                else:
                    found[load, server.name].append(figures)
                shown.advance(bar)
    return [_point(load, server, each) for (load, server), each in found.items() if each], failures


def _figures(analyzer: Analyzer, load: CurveLoad, row: Row, server: Contender) -> Figures | str:
    """Measure once, and again with longer windows if a window had no completed request."""
    figures: Figures | str = ""
    for window_s in (load.window_s, load.window_s * 3):
        measuring = msgspec.structs.replace(analyzer, window_s=window_s)
        figures = measuring.measure(row, MODEL, server.ports[row.protocol])
        if not isinstance(figures, str):
            break
    return figures


def _point(load: CurveLoad, server: str, rounds: list[Figures]) -> CurvePoint:
    return CurvePoint(
        transport=load.transport.name,
        server=server,
        byte_size=load.byte_size,
        clients=load.clients,
        rate=statistics.median(each.rate for each in rounds),
        p50_us=statistics.median(each.p50_us for each in rounds),
        p99_us=statistics.median(each.p99_us for each in rounds),
        rounds=rounds,
    )


def size_name(byte_size: int) -> str:
    """Return a size as text, such as `4 KiB`."""
    return f"{byte_size // KIB} KiB" if byte_size < MIB else f"{byte_size // MIB} MiB"


def print_table(curve: Curve) -> None:
    """Print latency and throughput by transport and size, ours next to Triton's."""
    points = {(p.transport, p.byte_size, p.clients, p.server): p for p in curve.points}
    table = Table(title="median latency with one client, MB/s with four; ratio: ours to Triton's")
    for name in ("transport", "size", "ours us", "triton us", "ratio", "ours MB/s", "triton MB/s", "ratio"):
        table.add_column(name, justify="left" if name == "transport" else "right", no_wrap=name == "transport")
    for transport in TRANSPORTS:
        for size in sorted({p.byte_size for p in curve.points if p.transport == transport.name}):
            cells = [transport.name, size_name(size)]
            for clients, of in ((LATENCY_CLIENTS, _latency), (THROUGHPUT_CLIENTS, _megabytes)):
                ours, theirs = (
                    of(point) if (point := points.get((transport.name, size, clients, server))) else None
                    for server in (OURS, TRITON)
                )
                cells += [f"{value:,.0f}" if value else "" for value in (ours, theirs)]
                cells.append(f"{ours / theirs:.2f}" if ours and theirs else "")
            table.add_row(*cells)
    Console().print(table)
    for failure in curve.failures:
        print(f"failed: {failure}")


def _latency(point: CurvePoint) -> float:
    return point.p50_us


def _megabytes(point: CurvePoint) -> float:
    return point.bytes_per_s / 1e6
