"""Our own server by the number of connections, with and without keep-alive, and by requests sent ahead (pipelining).

A server must not collapse where clients behave unusually: the rate of each line stays near its best one.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from bench.light import LightLoad, LightRequest, run_load
from bench.peers.servers.naiad import PEER
from bench.peers.serving import serving
from bench.peers.workloads import ADD_SUB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress

CONNECTIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEPTHS = (1, 2, 4, 8, 16, 32)
#: Connections whose requests are sent ahead.
PIPELINED_CONNECTIONS = 8

#: From this many requests in flight on, the server is busy.
BUSY_FROM = 8
#: A rate has collapsed if it is below this part of the best one of its line.
COLLAPSED = 0.5


class ConnectionPoint(msgspec.Struct, frozen=True):
    """A load: its line, connections and requests in flight on each; medians of the rates and latencies of rounds.

    `failures` are the reasons of rounds without figures. wrk has no p99 (0) of requests that were sent ahead.
    """

    line: str
    connections: int
    depth: int
    rates: list[float]
    p50_us: float
    p99_us: float
    failures: list[str] = []

    @property
    def rate(self) -> float:
        return statistics.median(self.rates) if self.rates else 0.0


KEEP_ALIVE, CLOSED, PIPELINED = "keep-alive", "a connection per request", "pipelining"


def points() -> list[tuple[str, int, int]]:
    """Return line, connections and depth of every point."""
    return [
        *((KEEP_ALIVE, count, 1) for count in CONNECTIONS),
        *((CLOSED, count, 1) for count in CONNECTIONS),
        *((PIPELINED, PIPELINED_CONNECTIONS, depth) for depth in DEPTHS),
    ]


def measure_connections(shown: Progress, seconds: int, rounds: int) -> list[ConnectionPoint]:
    """Measure our server, with one worker and add_sub in JSON. Raises `NotInstalled`."""
    endpoint = PEER.endpoints[ADD_SUB]
    message = endpoint.body.request(ADD_SUB)
    request = LightRequest(endpoint.path, message.body, message.headers)
    bar = shown.add_task("connections", total=len(points()))
    found: list[ConnectionPoint] = []
    with serving(PEER, 1) as served:
        for line, count, depth in points():
            shown.update(bar, description=f"{line}: {count} connections, {depth} ahead")
            load = LightLoad(
                "http", served.http_port, request, count, seconds=seconds, keep_alive=line != CLOSED, pipelining=depth
            )
            found.append(_point(line, load, rounds))
            shown.advance(bar)
    return found


def _point(line: str, load: LightLoad, rounds: int) -> ConnectionPoint:
    results = [run_load(load) for _ in range(rounds)]
    figures = [each for each in results if not isinstance(each, str)]
    return ConnectionPoint(
        line=line,
        connections=load.connections,
        depth=load.pipelining,
        rates=[each.rate for each in figures],
        p50_us=statistics.median(each.p50_us for each in figures) if figures else 0.0,
        p99_us=statistics.median(each.p99_us for each in figures) if figures else 0.0,
        failures=[each for each in results if isinstance(each, str)],
    )


def verdicts(found: Sequence[ConnectionPoint]) -> list[str]:
    """Return a sentence for each line: whether a rate of a busy server collapses."""
    lines: list[str] = []
    for line in dict.fromkeys(point.line for point in found):
        busy = [point for point in found if point.line == line and point.connections * point.depth >= BUSY_FROM]
        if not busy:
            continue
        best = max(point.rate for point in busy)
        worst = min(busy, key=lambda point: point.rate)
        part = worst.rate / best if best else 0.0
        verb = "COLLAPSES" if part < COLLAPSED else "holds"
        where = f"{worst.connections} connections" + (f", {worst.depth} ahead" if line == PIPELINED else "")
        lines.append(f"{line}: the rate {verb}; the lowest is {part:.2f} of the best, with {where}")
    return lines
