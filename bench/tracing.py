"""`python -m bench tracing`: what traces of timestamps cost the kernel process for each small request.

One server, whose trace settings change between slices of load (`bench.slices`). It does not poll, so that its
processor time is work and not waiting. The helper, which formats and writes, is measured apart.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.load import Spec
from bench.models import PYTHON_MODELS, write_python_model
from bench.server import ServerProcess
from bench.slices import OpenConnections, alternate, process_cpu_ns
from kernel.tracing.output.file_task import WriteArguments, write_traces
from kernel.tracing.trace import UsualTrace

if TYPE_CHECKING:
    from bench.intervals import Interval
    from bench.slices import Comparison

_CONNECTIONS = 8
_MODEL = "add_sub"

#: Requests before the first slice: see `WARM_UP_REQUESTS` of `bench.load`.
_WARM_UP = 3000

#: After a slice in which everything is traced, the kernel gives the last traces to the helper: the longest delay of
#: that, and some time for it. It belongs to the slice.
_HANDING_OVER_S = 0.3

_OFF: dict[str, object] = {"trace_level": ["OFF"]}

#: Traces that the helper writes at a time.
_WRITTEN = 4096


class _Row(msgspec.Struct, frozen=True):
    """A setting that is compared with no traces."""

    name: str
    setting: dict[str, object]
    #: The most that it may cost, as a part of the CPU time without traces.
    limit: float
    #: Requests of a slice, and those before it that are not counted.
    requests: int
    settling: int
    #: How long the server gets at the end of a slice to hand its traces over.
    pause_s: float
    #: For how long it is measured with each protocol.
    seconds: float


_ROWS = (
    # Each slice has one trace. In which slice it is handed over changes less than a thousandth.
    _Row("one in 1000", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1000"}, 0.01, 1000, 50, 0.0, 28.0),
    _Row("all", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}, 0.15, 4000, 0, _HANDING_OVER_S, 25.0),
)


def run() -> int:
    """Measure and print. Returns 1 if a setting costs too much. Raises `ServerFailed`, `BadResponse`."""
    failed = False
    order = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as folder:
        repository = Path(folder, "models")
        write_python_model(repository / _MODEL, *PYTHON_MODELS[_MODEL])
        # One file would become too large.
        flags = [f"--trace-config=triton,file={folder}/t", "--trace-config=triton,log-frequency=20000"]
        with ServerProcess(repository, *flags, "--busy-poll-us=0") as server:
            for protocol, port in (("http", server.http_port), ("grpc", server.grpc_port)):
                with OpenConnections(Spec(protocol, port, _CONNECTIONS, [_MODEL], 0.0, server.pid)) as connections:
                    connections.exchange(_WARM_UP)
                    for row in _ROWS:
                        failed = _report(protocol, row, _compare(server, connections, row, order)) or failed
            lost = _metric(server, "naiad_traces_lost_total")
    if lost:
        print(f"{lost:.0f} traces were lost, which cost less than those that are written: a busy machine")
    print(f"the helper takes {_helper_us():.1f} µs for a trace")
    return int(failed)


def _compare(server: ServerProcess, connections: OpenConnections, row: _Row, order: random.Random) -> Comparison:
    def measure(traces: bool) -> float:
        _change(server, row.setting if traces else _OFF)
        connections.exchange(row.settling)
        begin_ns = process_cpu_ns(server.pid)
        connections.exchange(row.requests)
        time.sleep(row.pause_s)
        return (process_cpu_ns(server.pid) - begin_ns) / row.requests / 1000

    found = alternate(measure, row.seconds, order)
    _change(server, _OFF)
    return found


def _report(protocol: str, row: _Row, found: Comparison) -> bool:
    """Print what was found. Returns whether it costs too much."""
    excess = found.excess
    before_us = statistics.median(found.before)
    print(
        f"{protocol}, {row.name}: {excess.median:+.1%} ({excess.low:+.1%} to {excess.high:+.1%} with"
        f" {excess.confidence:.0%} confidence, {len(found.before)} pairs) of {before_us:.1f} µs;"
        f" limit {row.limit:.0%}: {_verdict(excess, row.limit)}",
        flush=True,
    )
    return excess.median > row.limit


def _verdict(excess: Interval, limit: float) -> str:
    if excess.high <= limit:
        return "met"
    if excess.low > limit:
        return "not met"
    return "probably met" if excess.median <= limit else "probably not met"


def _change(server: ServerProcess, settings: dict[str, object]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=10)
    try:
        connection.request("POST", "/v2/trace/setting", json.dumps(settings))
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def _metric(server: ServerProcess, name: str) -> float:
    _, page = server.get("/metrics", server.metrics_port)
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def _helper_us() -> float:
    traces = [UsualTrace(0, id, "add_sub", 1, "", *(10**13 + number for number in range(10))) for id in range(_WRITTEN)]
    with tempfile.TemporaryDirectory() as folder:
        begin_ns = time.process_time_ns()
        write_traces(WriteArguments(str(Path(folder, "traces")), 0, [*traces]))
        return (time.process_time_ns() - begin_ns) / _WRITTEN / 1000
