"""`python -m bench growth`: the cost of a request as the number of connections, models or instances grows.

Rounds alternate between our server and Triton, under the load of `bench/load.py`. CPU time is counted separately for
the server's main process (our kernel, Triton's `tritonserver`) and its children (our workers, Triton's stubs).
`verdicts` judges only our server.
"""

from __future__ import annotations

import contextlib
import http.client
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from bench.contenders import OURS, TRITON, Contender, contenders
from bench.load import LoadNotRun, Sample, Spec, run_apart
from bench.machine import TRITON as TRITON_VERSION
from bench.machine import Machine, this_machine
from bench.models import copy_name, instances_name, write_growing_models
from bench.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROTOCOLS = ("http", "grpc")
ROUNDS, SECONDS = 3, 1.5

#: Connections where models or instances grow: enough to keep two cores busy.
CONNECTIONS = 16

#: Kernel CPU time per request is flat if it has grown by less than this factor: two equal rounds may differ as much.
FLAT = 1.25
#: A rate has collapsed if it is below this part of the best one.
COLLAPSED = 0.5

LOAD_TIMEOUT_S = 300

#: Without busy polling, because time in which a processor would be idle is not a cost of requests.
NOT_POLLING = "--busy-poll-us=0"


class Axis(msgspec.Struct, frozen=True):
    """What grows, in which steps, and the connections and models of each step."""

    name: str
    counts: tuple[int, ...]
    connections: Callable[[int], int]
    models: Callable[[int], list[str]]


CONNECTED = "connections"
AXES = [
    Axis(CONNECTED, (1, 4, 16, 64, 256), lambda count: count, lambda count: [copy_name(0)]),
    Axis("models", (1, 4, 16, 64), lambda count: CONNECTIONS, lambda count: [copy_name(n) for n in range(count)]),
    Axis("instances", (1, 2, 4), lambda count: CONNECTIONS, lambda count: [instances_name("add_sub", count)]),
    Axis("waiting instances", (1, 2, 4), lambda count: CONNECTIONS, lambda count: [instances_name("waiting", count)]),
]


class GrowthPoint(msgspec.Struct, frozen=True):
    """One measured point: medians of the rounds, and every round."""

    axis: str
    count: int
    protocol: str
    server: str
    rate: float
    p50_us: float
    p99_us: float
    server_cpu_us: float
    worker_cpu_us: float
    rounds: list[Sample]


class Verdict(msgspec.Struct, frozen=True):
    """How our server grows along one axis: its last step relative to the first (CPU time) and to the best (rate).

    If a request of a single client costs more CPU time than one of the first step, it counts instead of that one.
    Requests that arrive together at one model share wake-ups, and cannot share them when they are spread over many
    models. But no request may cost more than a single one.
    """

    axis: str
    protocol: str
    kernel_cpu_ratio: float
    rate_ratio: float
    flat: bool
    collapsed: bool


class Growth(msgspec.Struct, frozen=True):
    """A whole measurement, as it is stored. `triton` is empty if only our server was measured."""

    machine: Machine
    client: str
    rounds: int
    seconds: float
    triton: str
    points: list[GrowthPoint]
    verdicts: list[Verdict]
    failures: list[str] = []


def verdicts(points: Sequence[GrowthPoint]) -> list[Verdict]:
    """Judge the growth of our server for each axis and protocol."""
    lines: dict[tuple[str, str], list[GrowthPoint]] = {}
    for point in points:
        if point.server == OURS:
            lines.setdefault((point.axis, point.protocol), []).append(point)
    alone = {p.protocol: p.server_cpu_us for p in points if p.server == OURS and p.axis == CONNECTED and p.count == 1}
    found: list[Verdict] = []
    for (axis, protocol), line in lines.items():
        line.sort(key=lambda point: point.count)
        first = max(line[0].server_cpu_us, alone.get(protocol, 0.0))
        cpu = line[-1].server_cpu_us / first if first else 1.0
        rate = line[-1].rate / max(point.rate for point in line)
        found.append(Verdict(axis, protocol, cpu, rate, flat=cpu <= FLAT, collapsed=rate < COLLAPSED))
    return found


def shortened(axis: Axis) -> Axis:
    """Return an axis with at most three steps, for a quick look. 64 models would take too long to load."""
    counts = tuple(count for count in axis.counts[::2] if axis.name != "models" or count <= CONNECTIONS)
    return msgspec.structs.replace(axis, counts=counts)


def measure(*, quick: bool, with_triton: bool) -> Growth:
    """Measure everything in about 9 minutes, or in 2 minutes if `quick` (fewer steps, one round)."""
    machine = this_machine()
    axes = [shortened(axis) for axis in AXES] if quick else AXES
    rounds, seconds = (1, 1.0) if quick else (ROUNDS, SECONDS)
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as temporary:
        folder = Path(temporary)
        counts = {axis.name: axis.counts for axis in axes}
        write_growing_models(folder, max(counts["models"]), counts["instances"])
        triton_folder = folder if with_triton else None
        with contenders(folder, triton_folder, "--model-control-mode=explicit", our_flags=[NOT_POLLING]) as servers:
            points, failures = _measure_all(axes, servers, rounds, seconds)
    return Growth(
        machine=machine,
        client="bench/load.py",
        rounds=rounds,
        seconds=seconds,
        triton=TRITON_VERSION if len(servers) > 1 else "",
        points=points,
        verdicts=verdicts(points),
        failures=failures,
    )


def _measure_all(
    axes: list[Axis], servers: list[Contender], rounds: int, seconds: float
) -> tuple[list[GrowthPoint], list[str]]:
    points: list[GrowthPoint] = []
    failures: list[str] = []
    loaded: dict[str, set[str]] = {server.name: set() for server in servers}
    steps = [(axis, count) for axis in axes for count in axis.counts]
    with progress() as shown:
        bar = shown.add_task("starting", total=len(steps) * len(PROTOCOLS) * rounds * len(servers))
        for axis, count in steps:
            for server in servers:
                shown.update(bar, description=f"{axis.name} {count}, {server.name}: loading")
                _load_only(server, loaded[server.name], axis.models(count))
            for protocol in PROTOCOLS:
                samples: dict[str, list[Sample]] = {server.name: [] for server in servers}
                for server in servers * rounds:
                    name = f"{axis.name} {count}, {protocol}, {server.name}"
                    shown.update(bar, description=name)
                    try:
                        samples[server.name].append(run_apart(_spec(axis, count, protocol, server, seconds)))
                    except LoadNotRun as error:
                        failures.append(f"{name}: {error}")
                    shown.advance(bar)
                points += [_point((axis.name, count, protocol, name), each) for name, each in samples.items() if each]
    return points, failures


def _spec(axis: Axis, count: int, protocol: str, server: Contender, seconds: float) -> Spec:
    models, connections = axis.models(count), axis.connections(count)
    return Spec(protocol, server.ports[protocol], connections, models, seconds, server.pid)


def _point(key: tuple[str, int, str, str], samples: list[Sample]) -> GrowthPoint:
    axis, count, protocol, server = key
    medians = {
        name: statistics.median(getattr(sample, name) for sample in samples)
        for name in ("rate", "p50_us", "p99_us", "server_cpu_us", "worker_cpu_us")
    }
    return GrowthPoint(axis=axis, count=count, protocol=protocol, server=server, rounds=samples, **medians)


def _load_only(server: Contender, loaded: set[str], wanted: list[str]) -> None:
    """Load the models of `wanted` and unload all others, which would use memory and caches."""
    for model in sorted(loaded.difference(wanted)):
        _repository(server, model, "unload")
    for model in wanted:
        if model not in loaded:
            _repository(server, model, "load")
    loaded.clear()
    loaded.update(wanted)


def _repository(server: Contender, model: str, verb: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=LOAD_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("POST", f"/v2/repository/models/{model}/{verb}", body="{}")
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    if response.status != 200:
        raise RuntimeError(f"{server.name} did not {verb} {model}: {text}")


def print_table(growth: Growth) -> None:
    """Print every point, ours next to Triton's, and the verdicts."""
    table = Table(title="CPU: microseconds per request of the server's main process, and of its workers")
    for name in ("", "protocol", "requests/s", "Triton", "p50 us", "Triton", "p99 us", "Triton", "main CPU", "Triton",
                 "workers CPU", "Triton"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("", "protocol") else "right")
    points = {(p.axis, p.count, p.protocol, p.server): p for p in growth.points}
    for axis, count, protocol in dict.fromkeys((p.axis, p.count, p.protocol) for p in growth.points):
        cells = [f"{axis} {count}", protocol]
        for name in ("rate", "p50_us", "p99_us", "server_cpu_us", "worker_cpu_us"):
            for server in (OURS, TRITON):
                point = points.get((axis, count, protocol, server))
                cells.append(f"{getattr(point, name):,.0f}" if point else "")
        table.add_row(*cells)
    Console().print(table)
    for verdict in growth.verdicts:
        cpu = "flat or falling" if verdict.flat else "GROWS"
        rate = "COLLAPSES" if verdict.collapsed else "holds"
        print(
            f"{verdict.axis}, {verdict.protocol}: kernel CPU per request {cpu} "
            f"(last step {verdict.kernel_cpu_ratio:.2f} of the first or of a single client's), "
            f"rate {rate} (last step {verdict.rate_ratio:.2f} of the best)"
        )
    for failure in growth.failures:
        print(f"failed: {failure}")
