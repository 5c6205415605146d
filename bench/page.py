"""`python -m bench page`: what one open page (`GET /`) costs the kernel process, idle and under load.

One server with 40 models. Slices with the page's event stream open and without it alternate (`bench.slices`). Under
load, requests go to all models in turn, at an even rate, so that every row of the page changes every second.
"""

from __future__ import annotations

import http.client
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.load import Spec
from bench.models import PYTHON_MODELS, write_python_model
from bench.server import ServerProcess
from bench.slices import CONFIDENCE, OpenConnections, alternate, process_cpu_ns

if TYPE_CHECKING:
    from bench.slices import SliceComparison

_MODELS = 40

#: The most that an open page may cost, as a part of one processor.
LIMIT = 0.01

#: How long a slice lasts: three snapshots, which come once a second. It begins between two of them. And for how long
#: each row is measured.
_SLICE_S, _BETWEEN_S, _ROW_S = 3.0, 0.5, 50.0

#: The server sees that a page is closed when it sends the next snapshot.
_CLOSING_S = 1.5

#: Requests per second under load.
_RATE = 400
_PATH = "/dashboard/events"


def run() -> int:
    """Measure and print. Returns 1 if the page costs too much. Raises `ServerFailed`, `BadResponse`, `OSError`."""
    failed = False
    order = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as folder:
        names = [f"add_sub_{number}" for number in range(_MODELS)]
        for name in names:
            write_python_model(Path(folder, name), *PYTHON_MODELS["add_sub"])
        # Polling takes more processor time than the page, and not always the same.
        with ServerProcess(Path(folder), "--busy-poll-us=0") as server:
            spec = Spec("http", server.http_port, 1, names, 0.0, server.pid)
            with OpenConnections(spec) as connections:
                connections.exchange(_MODELS * 3)
                for title, rate in (("idle", 0), (f"{_RATE} requests/s", _RATE)):
                    failed = _report(title, _compare(server, connections, rate, order)) or failed
    return int(failed)


def _compare(server: ServerProcess, connections: OpenConnections, rate: int, order: random.Random) -> SliceComparison:
    def measure(with_page: bool) -> float:
        page = _OpenPage(server) if with_page else None
        try:
            begin_ns, begin_s = process_cpu_ns(server.pid), time.monotonic()
            _send(connections, rate, begin_s + _SLICE_S)
            used_ns, elapsed_s = process_cpu_ns(server.pid) - begin_ns, time.monotonic() - begin_s
            if page is not None:
                page.check()
        finally:
            if page is not None:
                page.close()
                time.sleep(_CLOSING_S)
        return used_ns / elapsed_s / 1e9

    return alternate(measure, _ROW_S, order)


def _send(connections: OpenConnections, rate: int, end_s: float) -> None:
    """Send `rate` requests per second until `end_s`."""
    while (now_s := time.monotonic()) < end_s:
        if not rate:
            time.sleep(end_s - now_s)
            continue
        connections.exchange(1)
        time.sleep(max(0.0, 1 / rate - (time.monotonic() - now_s)))


class _OpenPage:
    """The event stream of a page whose first snapshot has come. What follows waits in the socket."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=10)
        try:
            self._connection.request("GET", _PATH)
            self._response = self._connection.getresponse()
            assert self._response.status == 200, self._response.read()
            self._read_to("server")
            time.sleep(_BETWEEN_S)
        except BaseException:
            self.close()
            raise

    def _read_to(self, event: str) -> None:
        while (line := self._response.readline()).rstrip() != b"event: " + event.encode():
            assert line, "the stream has ended"

    def check(self) -> None:
        """Check that snapshots have come since the first one."""
        self._read_to("server")

    def close(self) -> None:
        self._connection.close()


def _report(title: str, found: SliceComparison) -> bool:
    """Print what was found. Returns whether the page costs too much."""
    cost = found.difference()
    verdict = "met" if cost.high <= LIMIT else "not met" if cost.value > LIMIT else "probably met"
    print(
        f"page open, {_MODELS} models, {title}: {cost.value:.2%} of a processor ({cost.low:.2%} to {cost.high:.2%} with"
        f" {CONFIDENCE:.0%} confidence, {4 * len(found.groups)} slices); limit {LIMIT:.0%}: {verdict}",
        flush=True,
    )
    return cost.value > LIMIT
