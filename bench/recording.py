"""`python -m bench recording`: what the flight recorder costs the kernel process for each small request.

One server with three equal models, of which nothing, one request in 1000, and each request is recorded. Paired: each
round measures all, one directly after the other, in an order that changes. A second server has no recorder; two
processes with the same code differ by some percent, so that it shows only how much that is. What else the machine does
can only add CPU time (cold caches, shared cores), so that the fastest rounds decide. The helper, which makes the
records and writes them, is measured apart.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from bench.load import Spec, run_apart
from bench.models import PYTHON_MODELS, write_python_model
from bench.server import ServerProcess
from kernel.records.record_task import (
    PassedRequest,
    PassedResponse,
    PassedTensor,
    RecordArguments,
    TensorRules,
    encode_arguments,
    write_records_task,
)
from kernel.records.recording_format import RingPosition

_ROUNDS, _SECONDS, _CONNECTIONS = 9, 0.7, 8
_MODEL = "add_sub"

#: What is recorded → the rate of the model.
_RATES = {"nothing": 0, "one in 1000": 1000, "all": 1}
#: What is compared: with the second, the first takes more CPU time by the third part at most; None for no limit.
_COMPARED = (("all", "nothing", 0.20), ("one in 1000", "nothing", 0.03), ("nothing", "no recorder", None))

#: Records that the helper writes at a time.
_WRITTEN = 512


def run() -> int:
    """Measure and print. Returns 1 if recording costs too much. Raises `ServerFailed`, `LoadNotRun`."""
    failed = False
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as folder:
        plain, recorded = Path(folder, "plain"), Path(folder, "recorded")
        write_python_model(plain / _MODEL, *PYTHON_MODELS[_MODEL])
        rates = ""
        for name, rate in _RATES.items():
            write_python_model(recorded / _model(name), *PYTHON_MODELS[_MODEL])
            rates += f",rate:{_model(name)}={rate}"
        flag = f"--record={folder}/recording,rate=0{rates}"
        with ServerProcess(plain) as off, ServerProcess(recorded, flag) as on:
            for protocol in ("http", "grpc"):
                failed = _protocol(off, on, protocol) or failed
            page = on.get("/metrics", on.metrics_port)[1]
            counts = re.findall(r"^naiad_records(_lost|)_total (\d+)$", page, re.MULTILINE)
            print(", ".join(f"{count} records were {'lost' if kind else 'written'}" for kind, count in counts))
    print(f"the helper takes {_helper_us():.1f} µs for a request and its response")
    return int(failed)


def _model(name: str) -> str:
    return name.replace(" ", "_")


def _protocol(off: ServerProcess, on: ServerProcess, protocol: str) -> bool:
    """Measure and print one protocol. Returns whether a rate costs too much."""
    order = random.Random(0)
    names = ["no recorder", *_RATES]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(_ROUNDS):
        order.shuffle(names)
        for name in names:
            server, model = (on, _model(name)) if name in _RATES else (off, _MODEL)
            port = server.http_port if protocol == "http" else server.grpc_port
            spec = Spec(protocol, port, _CONNECTIONS, [model], _SECONDS, server.pid)
            times[name].append(run_apart(spec).server_cpu_us)
    print(f"{protocol}: {statistics.median(times['no recorder']):.1f} µs of the kernel's CPU time without a recorder")
    failed = False
    for name, base, limit in _COMPARED:
        fastest = min(times[name]) / min(times[base]) - 1
        ratios = sorted(now / before - 1 for now, before in zip(times[name], times[base], strict=True))
        failed = failed or (limit is not None and fastest > limit)
        more = "" if limit is None else f", limit {limit:.0%}"
        rounds = f"rounds {ratios[0]:+.1%} to {ratios[-1]:+.1%}, median {statistics.median(ratios):+.1%}"
        print(f"  {name}, against {base}: {fastest:+.1%} by the fastest rounds ({rounds}){more}")
    return failed


def _helper_us() -> float:
    tensors = [PassedTensor(name, "FP32", [16], bytes(64)) for name in ("INPUT0", "INPUT1")]
    passed: list[PassedRequest | PassedResponse] = []
    for number in range(_WRITTEN // 2):
        flags = (0, False, False, False, 0, 0, False)
        passed.append(PassedRequest(number, 10**13, _MODEL, 1, tensors, "", "", [], {}, *flags, "http"))
        passed.append(PassedResponse(number, 10**13, True, "1", tensors, None, "", "", 10**13))
    with tempfile.TemporaryDirectory() as folder:
        wanted = RecordArguments(folder, "run", 1 << 30, RingPosition(1), TensorRules(1 << 20, False, False), passed)
        arguments = encode_arguments(msgspec.structs.astuple(wanted))
        begin_ns = time.process_time_ns()
        for _ in write_records_task(arguments, []):
            pass
        return (time.process_time_ns() - begin_ns) / (_WRITTEN // 2) / 1000
