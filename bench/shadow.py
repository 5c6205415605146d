"""`python -m bench shadow`: what a shadow of all requests costs the clients of a model.

One server with two versions of a model that waits, and of one that computes. Paired: each round measures the clients
without a shadow and with one of 100 %, one directly after the other, in an order that changes. The clients are as many
that the version has work always. The ratios are medians over the rounds; only the model that waits has limits, because
on two processors a shadow that computes takes what the clients need.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from bench.load import Sample, Spec, run_apart
from bench.models import ADD_SUB, PYTHON_MODELS, WAITING, write_python_model
from bench.server import ServerProcess

_ROUNDS, _SECONDS, _CONNECTIONS = 9, 1.5, 4

_POLICY = "version_policy { all { } }\n"

#: One waits for 2 ms, the other computes for about as long.
_SOURCES = {
    "waits": WAITING,
    "computes": ADD_SUB.replace("        responses = []", "        sum(range(100_000))\n        responses = []"),
}

#: Least rate and most p99 with the shadow, in parts of those without; None for no limit.
_LIMITS = {"waits": (0.97, 1.25), "computes": None}


def run() -> int:
    """Measure and print. Returns 1 if the shadow costs too much. Raises `ServerFailed`, `LoadNotRun`."""
    failed = False
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as folder:
        for name, source in _SOURCES.items():
            model = Path(folder, "models", name)
            write_python_model(model, _POLICY + PYTHON_MODELS["add_sub"][0], source)
            shutil.copytree(model / "1", model / "2")
        with ServerProcess(Path(folder, "models")) as server:
            for name, limit in _LIMITS.items():
                failed = _measure(server, name, limit) or failed
    return int(failed)


def _set_shadow(server: ServerProcess, name: str, *, on: bool) -> None:
    rule = {"weights": {"1": 1}, "shadow": {"to": "2"} if on else None}
    _call(server, name, rule)


def _call(server: ServerProcess, name: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.url}/v2/models/{name}/traffic", data)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def _measure(server: ServerProcess, name: str, limit: tuple[float, float] | None) -> bool:
    """Measure and print one model. Returns whether the shadow costs too much."""
    order = random.Random(0)
    samples: dict[bool, list[Sample]] = {False: [], True: []}
    pairs = dropped = 0
    spec = Spec("http", server.http_port, _CONNECTIONS, [name], _SECONDS, server.pid)
    for _ in range(_ROUNDS):
        for on in order.sample((False, True), 2):
            _set_shadow(server, name, on=on)
            samples[on].append(run_apart(spec))
            if on:
                found = _call(server, name)["shadow"]
                pairs, dropped = pairs + found["pairs"], dropped + sum(found["dropped"].values())
    with_it, without = samples[True], samples[False]
    rate = statistics.median(one.rate / other.rate for one, other in zip(with_it, without, strict=True))
    p99 = statistics.median(one.p99_us / other.p99_us for one, other in zip(with_it, without, strict=True))
    more = "" if limit is None else f", limits {limit[0]} and {limit[1]}"
    print(
        f"a model that {name}: rate {rate:.3f}, p99 {p99:.2f} of those without a shadow{more}; "
        f"{pairs:,} pairs compared, {dropped:,} requests dropped"
    )
    return limit is not None and (rate < limit[0] or p99 > limit[1])
