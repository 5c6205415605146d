"""A model that is loaded and unloaded two hundred times, and what all processes of its server take then."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psutil
import tritonclient.http

from bench.process_memory import memory_of
from bench.server import wait_for

if TYPE_CHECKING:
    from bench.server import ServerProcess

#: What two hundred loads may leave behind.
MOST_GROWTH = 8 << 20


def load_two_hundred_times(server: ServerProcess, model: str) -> None:
    """Load and unload the model. Raises `TimeoutError` if that has taken memory for good."""
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:

        def cycle(count: int) -> None:
            for _ in range(count):
                client.load_model(model)
                client.unload_model(model)

        cycle(20)
        before = memory_of_all(server)
        cycle(180)
        wait_for(lambda: memory_of_all(server) - before < MOST_GROWTH)  # the last worker may still be ending


def memory_of_all(server: ServerProcess) -> int:
    """Return the proportional memory of all processes of the server, in bytes."""
    total = 0
    for pid in (server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))):
        with contextlib.suppress(OSError):  # it has ended
            total += memory_of(pid).proportional
    return total
