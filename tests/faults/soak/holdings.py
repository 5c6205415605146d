"""What a server holds, seen from outside: memory, descriptors, threads, processes, leases, regions, sequences."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.machine import ProcessMemory, children_of, memory_of

if TYPE_CHECKING:
    from bench.server import ServerProcess

_SAMPLE = re.compile(r"^(naiad_\w+|nv_\w+)(?:\{[^}]*\})? ([\d.e+-]+)$", re.MULTILINE)

#: What differs between descriptors of one kind: numbers of sockets, and of the process that made an arena.
_PARTS_OF_ONE = re.compile(r":?\[\w+\]$|( \d+)? \(deleted\)$")


class Holdings(msgspec.Struct, frozen=True):
    """What a server holds at one time. Memory is private, in bytes."""

    at_s: float
    requests: int
    memory: int
    children_memory: int
    descriptors: int
    children_descriptors: int
    threads: int
    children: int
    #: Bytes of arenas that leases hold, requests without a final response, and sequences without an end.
    leased: int
    in_flight: int
    sequences: int
    regions: int
    connections: int
    #: Descriptors by what they are, and children by what they run.
    kinds: dict[str, int]
    processes: dict[str, int]


def kinds_of_descriptors(pid: int) -> Counter[str]:
    """Return how many descriptors of each kind a process has."""
    found = Counter[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[_PARTS_OF_ONE.sub("", os.readlink(entry))] += 1
    return found


def sums_of_metrics(text: str) -> dict[str, float]:
    """Return each metric of a page, added up over its labels."""
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def holdings(server: ServerProcess, at_s: float, requests: int) -> Holdings:
    """Read them. `at_s` and `requests` are the caller's: time since its start, and what it has sent."""
    metrics = sums_of_metrics(server.get("/metrics", server.metrics_port)[1])
    kinds = kinds_of_descriptors(server.pid)
    children = children_of(server.pid)
    memory, descriptors = ProcessMemory(), 0
    for child in children:
        with contextlib.suppress(OSError):
            memory += memory_of(child)
            descriptors += len(os.listdir(f"/proc/{child}/fd"))
    return Holdings(
        at_s=at_s,
        requests=requests,
        memory=memory_of(server.pid).private,
        children_memory=memory.private,
        descriptors=kinds.total(),
        children_descriptors=descriptors,
        threads=len(os.listdir(f"/proc/{server.pid}/task")),
        children=len(children),
        leased=int(metrics.get("naiad_arena_used_bytes", 0)),
        in_flight=int(metrics.get("naiad_inference_in_flight_requests", 0)),
        sequences=int(metrics.get("naiad_live_sequences", 0)),
        regions=len(_regions(server)),
        connections=int(metrics.get("naiad_server_open_connections", 0)),
        kinds=dict(kinds),
        processes=dict(Counter(server.workers().values())),
    )


def _regions(server: ServerProcess) -> list[object]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/v2/systemsharedmemory/status")
        found: list[object] = json.loads(connection.getresponse().read())
    return found
