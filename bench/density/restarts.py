"""How long a model is away after its worker was killed: until the next response, load of the model included."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import time
from typing import TYPE_CHECKING

from bench.density.figures import Restarts
from bench.density.kinds import KINDS, model_name, write_copies
from bench.load import LoadConnection, Spec
from bench.load_clients import BadResponse
from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from pathlib import Path

_LOADED = re.compile(r"is ready again, loaded in ([0-9.]+) s")


def measure_restarts(repository: Path, count: int) -> Restarts:
    """Kill the worker of a Python model `count` times. Raises `ServerFailed`, `BadResponse`.

    Between two kills a request is served, so that the pause before a restart does not grow.
    """
    write_copies(repository, KINDS[0], 1)
    total_ms: list[float] = []
    with ServerProcess(repository) as server:
        _ask_until_served(server)
        for number in range(count):
            worker = next(iter(server.workers()))
            began = time.perf_counter()
            os.kill(worker, signal.SIGKILL)
            _ask_until_served(server)
            total_ms.append((time.perf_counter() - began) * 1e3)
            wait_for(lambda expected=number + 1: len(_LOADED.findall(server.log)) == expected)  # type: ignore[misc]  # bound now
        load_ms = [float(seconds) * 1e3 for seconds in _LOADED.findall(server.log)]
    return Restarts(total_ms, load_ms)


def _ask_until_served(server: ServerProcess) -> None:
    """Send requests one after the other until one is served: the one that the worker has begun is lost with it."""
    while True:
        connection = LoadConnection(Spec("http", server.http_port, 1, [model_name(0)], 0, server.pid), 0)
        try:
            with contextlib.suppress(BadResponse, http.client.HTTPException):
                connection.exchange()
                return
        finally:
            connection.socket.close()
