"""`python -m bench tracing`: what traces of timestamps cost the kernel process for each small request.

One server, whose settings are changed between samples. Paired: each round measures all settings, one directly after the
other, in an order that changes. The helper, which formats and writes, is measured apart.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.load import Spec, run_apart
from bench.models import PYTHON_MODELS, write_python_model
from bench.server import ServerProcess
from kernel.tracing.output.file_task import WriteArguments, write_traces
from kernel.tracing.trace import TraceRecord

_ROUNDS, _SECONDS, _CONNECTIONS = 7, 1.0, 8
_MODEL = "add_sub"

#: Setting → its change of the server's settings, and the most that it may cost, as a part of the CPU time without
#: traces.
_SETTINGS: dict[str, tuple[dict[str, object], float]] = {
    "off": ({"trace_level": ["OFF"]}, 0.0),
    "one in 1000": ({"trace_level": ["TIMESTAMPS"], "trace_rate": "1000"}, 0.01),
    "all": ({"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}, 0.15),
}

#: Traces that the helper writes at a time.
_WRITTEN = 512


def run() -> int:
    """Measure and print. Returns 1 if a setting costs too much. Raises `ServerFailed`, `LoadNotRun`."""
    failed = False
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as folder:
        repository = Path(folder, "models")
        write_python_model(repository / _MODEL, *PYTHON_MODELS[_MODEL])
        # One file would become too large.
        flags = [f"--trace-config=triton,file={folder}/t", "--trace-config=triton,log-frequency=20000"]
        with ServerProcess(repository, *flags) as server:
            for protocol, port in (("http", server.http_port), ("grpc", server.grpc_port)):
                failed = _protocol(server, protocol, port) or failed
    print(f"the helper takes {_helper_us():.1f} µs for a trace")
    return int(failed)


def _protocol(server: ServerProcess, protocol: str, port: int) -> bool:
    """Measure and print one protocol. Returns whether a setting costs too much."""
    order = random.Random(0)
    names = list(_SETTINGS)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(_ROUNDS):
        order.shuffle(names)
        for name in names:
            _change(server, _SETTINGS[name][0])
            spec = Spec(protocol, port, _CONNECTIONS, [_MODEL], _SECONDS, server.pid)
            times[name].append(run_apart(spec).server_cpu_us)
    print(f"{protocol}: {statistics.median(times['off']):.1f} µs of the kernel's CPU time for a request without traces")
    failed = False
    for name, (_, limit) in _SETTINGS.items():
        if limit:
            ratios = sorted(now / before - 1 for now, before in zip(times[name], times["off"], strict=True))
            median = statistics.median(ratios)
            failed = failed or median > limit
            print(f"  {name}: {median:+.1%} (rounds {ratios[0]:+.1%} to {ratios[-1]:+.1%}), limit {limit:.0%}")
    return failed


def _change(server: ServerProcess, settings: dict[str, object]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=10)
    try:
        connection.request("POST", "/v2/trace/setting", json.dumps(settings))
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def _helper_us() -> float:
    names = ("HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END",
             "COMPUTE_OUTPUT_START", "COMPUTE_END", "INFER_RESPONSE_COMPLETE", "REQUEST_END", "HTTP_SEND_START",
             "HTTP_SEND_END")  # fmt: skip
    times = [part for position, name in enumerate(names) for part in (name, 10**13 + position)]
    records = [TraceRecord(id, 0, "add_sub", 1, "", times) for id in range(_WRITTEN)]
    with tempfile.TemporaryDirectory() as folder:
        begin_ns = time.process_time_ns()
        write_traces(WriteArguments(str(Path(folder, "traces")), 0, records))
        return (time.process_time_ns() - begin_ns) / _WRITTEN / 1000
