"""How long a server takes to say that it lives, measured from another process: `python -m tests.faults.health PORT`.

A GET request for `/v2/health/live` is due every ten milliseconds; its time counts from when it was due, so that
one that waits delays those behind it. The process prints `Waits` as JSON for each line that it reads.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from bench.heavy.healthy import Waits, waits
from bench.heavy.measurement import LineProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.server import ServerProcess

INTERVAL_S = 0.01
TIMEOUT_S = 20.0


class Health:
    """What `watched` yields."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process

    def counted(self) -> Waits:
        """Return what was counted since the last call."""
        self._process.say()
        return msgspec.json.decode(self._process.line(), type=Waits)


@contextlib.contextmanager
def watched(server: ServerProcess) -> Iterator[Health]:
    """Measure while the block runs."""
    process = LineProcess("tests.faults.health", str(server.http_port))
    try:
        health = Health(process)
        health.counted()  # to connect counts in no row
        yield health
    finally:
        process.close()


def main() -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=TIMEOUT_S)
    latencies_s: list[float] = []
    failures: list[str] = []
    due = time.perf_counter()
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))
        if readable:
            if not sys.stdin.readline():
                return
            sys.stdout.buffer.write(msgspec.json.encode(waits(latencies_s, failures)) + b"\n")
            sys.stdout.buffer.flush()
            latencies_s, failures = [], []
            continue
        try:
            connection.request("GET", "/v2/health/live")
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                failures.append(f"status {response.status}")
        except (OSError, http.client.HTTPException) as error:
            failures.append(repr(error))
            connection.close()
        latencies_s.append(time.perf_counter() - due)
        due += INTERVAL_S


if __name__ == "__main__":
    main()
