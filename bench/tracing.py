"""`python -m bench tracing`: what traces of timestamps cost the kernel process for each small request.

One server with the usual flags, whose trace settings change between slices of load (`bench.slices`). The helper, which
formats and writes, is measured apart.
"""

from __future__ import annotations

import http.client
import json
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.load import Spec
from bench.models import PYTHON_MODELS, write_python_model
from bench.server import ServerProcess
from bench.slices import CONFIDENCE, OpenConnections, alternate, process_cpu_ns
from kernel.records.trace import UsualRequest, UsualTrace
from kernel.records.trace_files import KeptPart, WriteArguments, write_traces

if TYPE_CHECKING:
    from bench.slices import Estimate, SliceComparison

_CONNECTIONS = 8
_MODEL = "add_sub"

#: Requests before the first slice: see `WARM_UP_REQUESTS` of `bench.load`.
_WARM_UP = 3000

#: Requests of a slice, and those before it that are not counted. With the rate of 1000 each slice has one trace.
_REQUESTS, _SETTLING = 1000, 50

#: What the kernel spends to give traces to the helper comes later than the requests, so it is measured apart: the
#: number of traces, a time that is longer than they wait, in seconds, and how often this is measured.
_HANDED_OVER, _HANDING_OVER_S, _HANDOVERS = 3000, 0.4, 6

_OFF: dict[str, object] = {"trace_level": ["OFF"]}

#: Traces that the helper writes at a time.
_WRITTEN = 4096


class _Row(msgspec.Struct, frozen=True):
    """A setting that is compared with no traces."""

    name: str
    setting: dict[str, object]
    #: The most that it may cost, as a part of the CPU time without traces.
    limit: float
    #: For how long it is measured with each protocol.
    seconds: float


_ROWS = (
    _Row("one in 1000", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1000"}, 0.01, 28.0),
    _Row("all", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}, 0.15, 15.0),
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
        with ServerProcess(repository, *flags) as server:
            for protocol, port in (("http", server.http_port), ("grpc", server.grpc_port)):
                with OpenConnections(Spec(protocol, port, _CONNECTIONS, [_MODEL], 0.0, server.pid)) as connections:
                    connections.exchange(_WARM_UP)
                    handover_us = _handover_us(server, connections, order)
                    for row in _ROWS:
                        found = _compare(server, connections, row, order)
                        failed = _report(protocol, row, found, handover_us) or failed
            lost = _metric(server, "naiad_traces_lost_total")
    if lost:
        print(f"{lost:.0f} traces were lost, which cost less than those that are written: a busy machine")
    print(f"the helper takes {_helper_us():.1f} µs for a trace")
    return int(failed)


def _compare(server: ServerProcess, connections: OpenConnections, row: _Row, order: random.Random) -> SliceComparison:
    def measure(traces: bool) -> float:
        _change(server, row.setting if traces else _OFF)
        connections.exchange(_SETTLING)
        begin_ns = process_cpu_ns(server.pid)
        connections.exchange(_REQUESTS)
        return (process_cpu_ns(server.pid) - begin_ns) / _REQUESTS / 1000

    found = alternate(measure, row.seconds, order)
    _change(server, _OFF)
    return found


def _handover_us(server: ServerProcess, connections: OpenConnections, order: random.Random) -> float:
    """Return the kernel's CPU time for a trace between its end and the end of its writing, in microseconds."""

    def measure(traces: bool) -> float:
        _change(server, _ROWS[-1].setting if traces else _OFF)
        connections.exchange(_HANDED_OVER)
        begin_ns = process_cpu_ns(server.pid)
        time.sleep(_HANDING_OVER_S)
        return (process_cpu_ns(server.pid) - begin_ns) / _HANDED_OVER / 1000

    time.sleep(_HANDING_OVER_S)
    found = alternate(measure, 0.0, order, _HANDOVERS // 2)
    _change(server, _OFF)
    return max(0.0, found.difference().value)


def _report(protocol: str, row: _Row, found: SliceComparison, handover_us: float) -> bool:
    """Print what was found. Returns whether it costs too much."""
    share = 1 / float(str(row.setting["trace_rate"]))
    excess = found.excess(handover_us * share)
    print(
        f"{protocol}, {row.name}: {excess.value:+.1%} ({excess.low:+.1%} to {excess.high:+.1%} with {CONFIDENCE:.0%}"
        f" confidence, {4 * len(found.groups)} slices) of {found.before:.1f} µs; limit {row.limit:.0%}:"
        f" {_verdict(excess, row.limit)}",
        flush=True,
    )
    return excess.value > row.limit


def _verdict(excess: Estimate, limit: float) -> str:
    if excess.high <= limit:
        return "met"
    if excess.low > limit:
        return "not met"
    return "probably met" if excess.value <= limit else "probably not met"


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
    traces = [
        UsualTrace(10, UsualRequest(0, id, ("add_sub", 1), "", 1, 2, 3, 4, (5, 6, 7, 8), 9)) for id in range(_WRITTEN)
    ]
    with tempfile.TemporaryDirectory() as folder:
        begin_ns = time.process_time_ns()
        write_traces(WriteArguments(str(Path(folder, "traces")), KeptPart(), [*traces]))
        return (time.process_time_ns() - begin_ns) / _WRITTEN / 1000
