"""A model that is loaded and unloaded two hundred times, and what all processes of its server take then."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import tritonclient.http

from bench.server import wait_for

if TYPE_CHECKING:
    from bench.server import ServerProcess

_ANONYMOUS = re.compile(r"^Pss_Anon:\s+(\d+) kB$", re.MULTILINE)

#: What two hundred loads may leave behind.
MOST_GROWTH = 16 << 20


def load_two_hundred_times(server: ServerProcess, model: str) -> None:
    """Load and unload the model. Raises `TimeoutError` if that has taken memory for good."""
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:

        def cycle(count: int) -> None:
            for _ in range(count):
                client.load_model(model)
                client.unload_model(model)
            wait_for(lambda: not server.workers(model))

        cycle(20)
        before = memory_of_all(server)
        cycle(180)
        wait_for(lambda: memory_of_all(server) - before < MOST_GROWTH)  # the kernel gives memory back a little later


def memory_of_all(server: ServerProcess) -> int:
    """Return the anonymous memory of all processes of the server, in bytes, each page once.

    Pages of files are shared with the servers of other tests, whose ends change what a page counts here. A process that
    ends or is forked while the others are read changes what their pages count as well: half of what a worker shares
    with its zygote would be missing. So all are read again until the processes have stayed the same.
    """
    while True:
        processes = _processes_of(server)
        found = [_anonymous_memory(pid) for pid in processes]
        if None not in found and _processes_of(server) == processes:
            return sum(each or 0 for each in found)


def _processes_of(server: ServerProcess) -> set[int]:
    return {server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))}


def _anonymous_memory(pid: int) -> int | None:
    """Return the bytes of a process; None if it has ended, or is about to."""
    try:
        found = _ANONYMOUS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return None
    return int(found[1]) << 10 if found is not None else None
