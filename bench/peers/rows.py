"""The loads that every peer is given, and one run of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.light import LightLoad, LightRequest, run_load
from bench.machine import cpu_times
from bench.peers.workloads import ADD_SUB, DIGITS, MEBIBYTE, TITLES, TREES, outputs_of
from bench.rows import Analyzer, Row

if TYPE_CHECKING:
    from bench.peers.peer import PeerEndpoint, PeerServer, ServedPeer
    from bench.rows import Figures

LIGHT, GRPC, ANALYZER = "light", "grpc", "perf_analyzer"

#: What is sent before the first row of a model, and not counted.
_WARM_UP_CONNECTIONS, _WARM_UP_S = 8, 1


class PeerRow(msgspec.Struct, frozen=True):
    """A load: which model is asked, by which client, over how many connections.

    `LIGHT` is wrk, or h2load where the peer takes the model only over gRPC. `GRPC` is h2load, for peers with the v2
    protocol, and `ANALYZER` perf_analyzer, for those with Triton's model configuration.
    """

    model: str
    client: str
    connections: int

    @property
    def name(self) -> str:
        client = {GRPC: ", gRPC", ANALYZER: ", perf_analyzer"}.get(self.client, "")
        return f"{TITLES[self.model]}{client}, c={self.connections}"


ROWS = [
    *(PeerRow(ADD_SUB, LIGHT, connections) for connections in (1, 8, 32)),
    *(PeerRow(DIGITS, LIGHT, connections) for connections in (1, 32)),
    *(PeerRow(MEBIBYTE, LIGHT, connections) for connections in (1, 4)),
    *(PeerRow(ADD_SUB, GRPC, connections) for connections in (1, 32)),
    PeerRow(ADD_SUB, ANALYZER, 8),
    *(PeerRow(TREES, LIGHT, connections) for connections in (8, 32)),
]


class PeerSample(msgspec.Struct, frozen=True):
    """One run of a row. The CPU time is of all processes of the server, in microseconds per request."""

    peer: str
    workers: int
    row: str
    rate: float
    p50_us: float
    p99_us: float
    cpu_us: float
    requests: int


def applies(row: PeerRow, peer: PeerServer) -> bool:
    """Return whether a peer has what a row asks for."""
    if row.client == ANALYZER:
        return peer.analyzer is not None
    return row.model in (peer.grpc if row.client == GRPC else peer.endpoints)


def warm_up(peer: PeerServer, served: ServedPeer) -> None:
    """Ask every model for a second. What goes wrong shows in the rows as well."""
    for endpoint, model in [(each, model) for endpoints in (peer.endpoints, peer.grpc)
                            for model, each in endpoints.items()]:  # fmt: skip
        run_load(_load(endpoint, model, served, _WARM_UP_CONNECTIONS, _WARM_UP_S))


def run_row(
    row: PeerRow, peer: PeerServer, served: ServedPeer, workers: int, seconds: int, analyzer: Analyzer | None
) -> PeerSample | str:
    """Run a row on a peer once. Returns the reason if there are no figures."""
    before = cpu_times(served.pid)
    if row.client == ANALYZER:
        figures = _analyze(row, peer, served, analyzer)
    else:
        endpoints = peer.grpc if row.client == GRPC else peer.endpoints
        figures = run_load(_load(endpoints[row.model], row.model, served, row.connections, seconds))
    if isinstance(figures, str):
        return figures
    used_s = (cpu_times(served.pid) - before).total_s
    return PeerSample(
        peer=peer.name,
        workers=workers,
        row=row.name,
        rate=figures.rate,
        p50_us=figures.p50_us,
        p99_us=figures.p99_us,
        cpu_us=used_s / figures.requests * 1e6,
        requests=figures.requests,
    )


def _load(endpoint: PeerEndpoint, model: str, served: ServedPeer, connections: int, seconds: int) -> LightLoad:
    message = endpoint.body.request(model)
    request = LightRequest(endpoint.path, message.body, message.headers)
    if endpoint.is_grpc:
        smallest = sum(values.nbytes for values in outputs_of(model).values())
        return LightLoad("grpc", served.grpc_port, request, connections, seconds=seconds, response_byte_size=smallest)
    return LightLoad("http", served.http_port, request, connections, seconds=seconds)


def _analyze(row: PeerRow, peer: PeerServer, served: ServedPeer, analyzer: Analyzer | None) -> Figures | str:
    if analyzer is None:
        return "perf_analyzer is not available"
    measured = Row(row.name, row.model, "http", row.connections, peer.analyzer or ())
    return analyzer.measure(measured, row.model, served.http_port)
