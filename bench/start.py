"""`python -m bench start`: how long a server takes to start, and how much memory it uses."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.checkout import ROOT
from bench.load import LoadConnection, Spec
from bench.models import copy_name, write_growing_models
from bench.process_memory import ProcessMemory, memory_of
from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
MIB = 1 << 20

#: Requests over each protocol before the memory of the kernel is read a second time.
REQUESTS = 1000


KINDS: dict[str, Callable[[ProcessMemory], int]] = {
    "private": lambda memory: memory.private,
    "proportional": lambda memory: memory.proportional,
}


def run() -> None:
    """Start the demo server several times, and print medians with the smallest and largest values.

    The byte code of all modules is written before, by a start that does not count.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with ServerProcess(None):
        pass
    seconds: list[float] = []
    memories: dict[str, list[ProcessMemory]] = {}
    for _ in range(ROUNDS):
        started = time.perf_counter()
        with ServerProcess(None) as server:
            seconds.append(time.perf_counter() - started)
            memories.setdefault("kernel", []).append(memory_of(server.pid))
            for pid, name in server.workers().items():
                memories.setdefault(f"worker {name}", []).append(memory_of(pid))
        title = f"kernel after {REQUESTS} requests over each protocol"
        memories.setdefault(title, []).append(_after_requests())
    cores = len(os.sched_getaffinity(0))
    print(
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores, {ROUNDS} starts"
    )
    print(f"{'ready after':66} {show(seconds)} s")
    for name, found in sorted(memories.items()):
        for kind, value in KINDS.items():
            print(f"{f'{kind} memory, {name}':66} {show([value(each) / MIB for each in found])} MiB")


def _after_requests() -> ProcessMemory:
    """Return the memory of a kernel that has served requests, one after the other, over each protocol."""
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as temporary:
        write_growing_models(Path(temporary), 1, ())
        demo = f"--model-repository={ROOT / 'kernel/demo'}"
        with ServerProcess(Path(temporary), demo) as server:
            for protocol, port in (("http", server.http_port), ("grpc", server.grpc_port)):
                connection = LoadConnection(Spec(protocol, port, 1, [copy_name(0)], 0, server.pid), 0)
                try:
                    for _ in range(REQUESTS):
                        connection.exchange()
                finally:
                    connection.socket.close()
            return memory_of(server.pid)


def show(values: list[float]) -> str:
    """Return the median with the smallest and largest value, as text."""
    return f"{statistics.median(values):8.2f}  ({min(values):.2f} to {max(values):.2f})"
