"""Measures the peers in turn: each is started, checked, warmed up, loaded row by row, checked again and ended.

One peer runs at a time, because an idle one takes processor time as well (Ray a tenth of a core). So a round starts
every peer again. All peers stand here, in the order of the table.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from bench.light import client_versions
from bench.machine import PERF_ANALYZER, Machine, this_machine
from bench.machine import TRITON as TRITON_VERSION
from bench.peers.connections import ConnectionPoint, measure_connections, points
from bench.peers.peer import NotInstalled, PeerServer, environment
from bench.peers.rows import ROWS, PeerSample, applies, run_row, warm_up
from bench.peers.servers import bentoml, fastapi, kserve, litserve, mlserver, mosec, naiad, ray_serve, triton
from bench.peers.serving import check, serving
from bench.peers.workloads import WrongResponse
from bench.progress import progress
from bench.rows import Analyzer
from bench.triton import NotAvailable, onnx_backend, perf_analyzer, server_root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress, TaskID

PEERS = [
    naiad.PEER,
    triton.PYTHON,
    triton.ONNX,
    mosec.PEER,
    fastapi.PEER,
    kserve.PEER,
    mlserver.PEER,
    litserve.PEER,
    bentoml.PEER,
    ray_serve.PEER,
]

#: How long our own server by connections takes, for each second of a load and round, in seconds.
_CONNECTIONS_S = len(points()) * 1.1


class PeerDescription(msgspec.Struct, frozen=True):
    """A peer as it was measured: its versions, what was set, where that is documented, and how bodies are written."""

    name: str
    title: str
    versions: dict[str, str]
    settings: str
    source: str
    bodies: dict[str, str]


class PeerFailure(msgspec.Struct, frozen=True):
    """What could not be measured, and why. `row` is empty if the peer was skipped with that number of workers."""

    peer: str
    workers: int
    row: str
    reason: str


class PeerResults(msgspec.Struct, frozen=True):
    """A whole measurement, as it is stored: every round of every row, and our own server by connections."""

    machine: Machine
    clients: str
    seconds: int
    peers: list[PeerDescription]
    samples: list[PeerSample]
    failures: list[PeerFailure] = []
    connections: list[ConnectionPoint] = []


def chosen(only: str) -> list[PeerServer]:
    """Return the peers that a list of names with commas asks for; a name that is no whole one is a part of several.

    An empty text asks for all.
    """
    found: list[PeerServer] = []
    for name in only.split(","):
        exact = [peer for peer in PEERS if peer.name == name]
        found += exact or [peer for peer in PEERS if name in peer.name]
    return [peer for peer in PEERS if peer in found]


def worker_counts(asked: int | None) -> list[int]:
    """Return the asked number of workers, or one and as many as there are cores."""
    return [asked] if asked else sorted({1, len(os.sched_getaffinity(0))})


def measure(
    peers: Sequence[PeerServer],
    counts: Sequence[int],
    rounds: int,
    seconds: int,
    *,
    connections: bool,
    limit_s: float = math.inf,
) -> PeerResults:
    """Measure peers with each number of workers, in rounds; and our server by `connections` if wanted.

    There are fewer rounds, but one, where more would take longer than `limit_s`, without installations.
    """
    machine = this_machine()
    samples: list[PeerSample] = []
    failures: list[PeerFailure] = []
    analyzer = _analyzer()
    with progress() as shown:
        bar = shown.add_task("installing", total=len(peers))
        described = [description for peer in peers if (description := _describe(peer, shown, bar, failures))]
        usable = [peer for peer in peers if peer.name in {each.name for each in described}]
        bar = shown.add_task("starting", total=sum(map(_rows_of, usable)) * len(counts) * rounds)
        begun_s = time.monotonic()
        for done in range(rounds):
            spent_s = time.monotonic() - begun_s
            if not has_time(done, spent_s, limit_s, _CONNECTIONS_S * seconds if connections else 0.0):
                rounds = done
                print(f"{rounds} rounds: another one would take longer than --minutes", file=sys.stderr)
                break
            for peer in usable:
                for workers in counts:
                    _measure_peer(peer, workers, seconds, analyzer, samples, failures, shown, bar)
        by_connections = measure_connections(shown, seconds, rounds) if connections else []
    return PeerResults(
        machine=machine,
        clients=f"{client_versions()}, perf_analyzer {PERF_ANALYZER}",
        seconds=seconds,
        peers=described,
        samples=samples,
        failures=failures,
        connections=by_connections,
    )


def has_time(done: int, spent_s: float, limit_s: float, more_s: float) -> bool:
    """Return whether another round fits into `limit_s`, of which `done` rounds have taken `spent_s`.

    `more_s` is what is measured after all rounds, for each of them. The first round is measured in any case.
    """
    return not done or (spent_s / done + more_s) * (done + 1) <= limit_s


def install(peers: Sequence[PeerServer]) -> list[PeerFailure]:
    """Install what the peers need, and perf_analyzer. Returns what cannot be installed."""
    failures: list[PeerFailure] = []
    with progress() as shown:
        bar = shown.add_task("installing", total=len(peers))
        for peer in peers:
            if _describe(peer, shown, bar, failures) is None or not peer.name.startswith("triton"):
                continue
            try:
                server_root()
                if peer.name == "triton-onnx":
                    onnx_backend()
            except NotAvailable as error:
                failures.append(PeerFailure(peer.name, 0, "", str(error)))
    _analyzer()
    return failures


def merged(before: PeerResults, added: PeerResults) -> PeerResults:
    """Return results with the rounds of both; versions, settings and machine are from `added`.

    The machine's load before the start is the higher one.

    Peers and connections that `added` lacks stay as they were.
    """
    names = {peer.name for peer in added.peers} | {failure.peer for failure in added.failures if not failure.workers}
    described = {peer.name: peer for peer in [*before.peers, *added.peers]}
    order = {peer.name: number for number, peer in enumerate(PEERS)}
    kept = [failure for failure in before.failures if failure.workers or failure.peer not in names]
    load = max(before.machine.load, added.machine.load)
    return msgspec.structs.replace(
        added,
        machine=msgspec.structs.replace(added.machine, load=load),
        peers=sorted(described.values(), key=lambda peer: order.get(peer.name, len(order))),
        samples=[*before.samples, *added.samples],
        failures=[*kept, *added.failures],
        connections=added.connections or before.connections,
    )


def _rows_of(peer: PeerServer) -> int:
    return sum(applies(row, peer) for row in ROWS)


def _describe(peer: PeerServer, shown: Progress, bar: TaskID, failures: list[PeerFailure]) -> PeerDescription | None:
    """Install a peer, and describe it. Returns None if that fails, with a failure for all numbers of workers."""
    shown.update(bar, description=f"installing {peer.title}")
    versions = {"triton": TRITON_VERSION} if peer.name.startswith("triton") else {}
    try:
        if peer.requirements:
            versions = environment(peer).versions
    except NotInstalled as error:
        failures.append(PeerFailure(peer.name, 0, "", str(error)))
        return None
    finally:
        shown.advance(bar)
    bodies = {model: endpoint.body.name for model, endpoint in peer.endpoints.items()}
    return PeerDescription(peer.name, peer.title, versions, peer.settings, peer.source, bodies)


def _measure_peer(
    peer: PeerServer,
    workers: int,
    seconds: int,
    analyzer: Analyzer | None,
    samples: list[PeerSample],
    failures: list[PeerFailure],
    shown: Progress,
    bar: TaskID,
) -> None:
    """Start a peer once, and run all its rows."""
    name = f"{peer.title} x{workers}"
    shown.update(bar, description=f"{name}: starting")
    rows = [row for row in ROWS if applies(row, peer)]
    done = 0
    try:
        with serving(peer, workers) as served:
            shown.update(bar, description=f"{name}: warming up")
            warm_up(peer, served)
            for row in rows:
                shown.update(bar, description=f"{name}: {row.name}")
                sample = run_row(row, peer, served, workers, seconds, analyzer)
                if isinstance(sample, str):
                    failures.append(PeerFailure(peer.name, workers, row.name, sample))
                else:
                    samples.append(sample)
                done += 1
                shown.advance(bar)
            check(peer, served)
    except (NotInstalled, WrongResponse, OSError) as error:
        failures.append(PeerFailure(peer.name, workers, "", str(error)))
    shown.advance(bar, len(rows) - done)


def _analyzer() -> Analyzer | None:
    try:
        return Analyzer(*perf_analyzer())
    except NotAvailable as error:
        print(f"without perf_analyzer: {error}", file=sys.stderr)
        return None
