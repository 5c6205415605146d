"""`python -m bench shadow`: what a shadow of all requests, and a traffic rule, cost the clients of a model.

One server has models with two versions. Paired: each round measures the clients without and with the shadow or rule,
one directly after the other, in an order that changes. The ratios are medians over the rounds.

A model that waits has as many clients that its version has work always. One that computes has half of the requests
that it can execute, sent when they are due: on two processors, a shadow beside more takes what the clients need. A rule
is measured with a small model, nearly all of whose requests go to the version that has them without the rule.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench.load import LoadNotRun, Spec, run_apart
from bench.models import ADD_SUB, ALL_VERSIONS, PYTHON_MODELS, WAITING, write_python_model
from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS, _SECONDS, _CONNECTIONS = 9, 1.5, 4

#: One waits for 2 ms, the other computes for about as long.
_SOURCES = {
    "waits": WAITING,
    "computes": ADD_SUB.replace("        responses = []", "        sum(range(100_000))\n        responses = []"),
    "small": ADD_SUB,
}

_SHADOW: dict[str, Any] = {"weights": {"2": 1}, "shadow": {"to": "1"}}

_BY_WEIGHT: dict[str, Any] = {"weights": {"2": 99, "1": 1}}

#: No request matches, so that both the header and the weights are looked at, and the same version executes all requests
#: as without a rule: the newest.
_BY_HEADER: dict[str, Any] = {
    "weights": {"2": 1},
    "rules": [{"header": "content-type", "is": ["text/plain", "image/png"], "to": "1"}],
}


class _Figures(msgspec.Struct, frozen=True):
    """Requests per second, and the microseconds in which 99 % of them are done."""

    rate: float
    p99_us: float


class _Comparison(msgspec.Struct, frozen=True):
    """What is compared for a model: its rule, and the least rate and most p99 in parts of those without."""

    title: str
    model: str
    rule: dict[str, Any]
    least_rate: float
    most_p99: float
    #: The part of what the model can execute that clients send; None: as much as it can.
    part: float | None = None


_COMPARISONS = (
    _Comparison("a shadow of a model that waits", "waits", _SHADOW, 0.97, 1.25),
    _Comparison("a shadow of a model that computes, clients at half", "computes", _SHADOW, 0.95, 1.5, part=0.5),
    _Comparison("a rule of two versions by weight", "small", _BY_WEIGHT, 0.95, 1.25),
    _Comparison("a rule of two versions by header", "small", _BY_HEADER, 0.95, 1.25),
)


def run(rounds: int = _ROUNDS, only: str = "") -> int:
    """Measure and print. Returns 1 if something costs too much. Raises `ServerFailed`, `LoadNotRun`."""
    failed = False
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as folder:
        for name, source in _SOURCES.items():
            model = Path(folder, "models", name)
            write_python_model(model, ALL_VERSIONS + PYTHON_MODELS["add_sub"][0], source)
            shutil.copytree(model / "1", model / "2")
        with ServerProcess(Path(folder, "models")) as server:
            for comparison in _COMPARISONS:
                if only in comparison.title:
                    failed = _measure(server, comparison, rounds) or failed
    return int(failed)


def _call(server: ServerProcess, name: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.url}/v2/models/{name}/{path}", data)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def _loader(server: ServerProcess, comparison: _Comparison) -> Callable[[], _Figures]:
    """Return what loads the model. Raises `LoadNotRun`."""
    spec = Spec("http", server.http_port, _CONNECTIONS, [comparison.model], _SECONDS, server.pid)

    def as_much_as_it_can() -> _Figures:
        sample = run_apart(spec)
        return _Figures(sample.rate, sample.p99_us)

    if comparison.part is None:
        return as_much_as_it_can
    rate = comparison.part * as_much_as_it_can().rate
    return lambda: _at_rate(server, comparison.model, rate)


def _at_rate(server: ServerProcess, name: str, rate: float) -> _Figures:
    """Load a model with requests that are sent when they are due. Raises `LoadNotRun`."""
    command = [
        sys.executable, "-m", "kernel", "bench", name, "--url", server.url, "--rate", f"{rate:.0f}", "--json",
        "--concurrency", "32", "--duration", str(2 * _SECONDS), "--distribution", "poisson",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadNotRun(done.stderr.strip() or done.stdout.strip())
    [point] = json.loads(done.stdout)["runs"][0]["points"]
    return _Figures(point["rate"], point["latency"]["percentiles"]["99"])


def _measure(server: ServerProcess, comparison: _Comparison, rounds: int) -> bool:
    """Measure and print one comparison. Returns whether it costs too much."""
    order = random.Random(0)
    found: dict[bool, list[_Figures]] = {False: [], True: []}
    pairs = dropped = 0
    name = comparison.model
    _call(server, name, "traffic/reset", {})
    load = _loader(server, comparison)
    for _ in range(rounds):
        for on in order.sample((False, True), 2):
            _call(server, name, *(("traffic", comparison.rule) if on else ("traffic/reset", {})))
            found[on].append(load())
            if on and (shadow := _call(server, name, "traffic")["shadow"]) is not None:
                pairs, dropped = pairs + shadow["pairs"], dropped + sum(shadow["dropped"].values())
    _call(server, name, "traffic/reset", {})
    rate = statistics.median(one.rate / other.rate for one, other in zip(found[True], found[False], strict=True))
    p99 = statistics.median(one.p99_us / other.p99_us for one, other in zip(found[True], found[False], strict=True))
    more = f"; {pairs:,} pairs compared, {dropped:,} requests dropped" if "shadow" in comparison.rule else ""
    print(
        f"{comparison.title}: rate {rate:.3f} (at least {comparison.least_rate}), p99 {p99:.2f} "
        f"(at most {comparison.most_p99}) of those without; "
        f"{statistics.median(each.rate for each in found[False]):,.0f} requests/s, p99 "
        f"{statistics.median(each.p99_us for each in found[False]) / 1000:.2f} ms without{more}",
        flush=True,
    )
    return rate < comparison.least_rate or p99 > comparison.most_p99
