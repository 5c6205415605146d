"""`python -m bench start`: how long a server takes to start, and how much memory it uses before its first request."""

from __future__ import annotations

import os
import platform
import statistics
import time

from bench.server import ServerProcess, rss_bytes

ROUNDS = 5
MIB = 1 << 20


def run() -> None:
    """Start the demo server several times, and print medians with the smallest and largest values."""
    seconds: list[float] = []
    kernel: list[float] = []
    workers: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        started = time.perf_counter()
        with ServerProcess(None) as server:
            seconds.append(time.perf_counter() - started)
            kernel.append(rss_bytes(server.pid) / MIB)
            for pid, name in server.workers().items():
                workers.setdefault(name, []).append(rss_bytes(pid) / MIB)
    cores = len(os.sched_getaffinity(0))
    print(
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores, {ROUNDS} starts"
    )
    print(f"{'ready after':32} {show(seconds)} s")
    print(f"{'resident memory, kernel':32} {show(kernel)} MiB")
    for name, sizes in sorted(workers.items()):
        print(f"{'resident memory, worker ' + name:32} {show(sizes)} MiB")


def show(values: list[float]) -> str:
    """Return the median with the smallest and largest value, as text."""
    return f"{statistics.median(values):8.2f}  ({min(values):.2f} to {max(values):.2f})"
