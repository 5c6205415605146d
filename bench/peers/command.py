"""`python -m bench peers`: which peers are measured, what is kept of the last run, and the table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bench import store
from bench.peers import environments
from bench.peers.measurement import PeerResults, chosen, install, measure, merged, worker_counts
from bench.peers.table import print_table
from bench.triton import NotAvailable

if TYPE_CHECKING:
    from pathlib import Path

    from bench.peers.peer import PeerServer


def run(
    only: str,
    rounds: int,
    workers: int | None,
    last: Path | None,
    *,
    connections: bool,
    seconds: int,
    upgrade: bool,
    limit_s: float = math.inf,
) -> PeerResults:
    """Measure, print the table, and return the results, with those of the file `last` if it is given and exists.

    Raises `NotAvailable` if no peer has that name.
    """
    peers = _chosen(only, upgrade=upgrade)
    connections = connections and any(peer.name == "naiad" for peer in peers)
    results = measure(peers, worker_counts(workers), rounds, seconds, connections=connections, limit_s=limit_s)
    if last is not None and last.exists():
        results = merged(store.read_json(last, PeerResults), results)
    print_table(results)
    return results


def install_only(only: str, *, upgrade: bool) -> bool:
    """Install the peers, and say what cannot be installed. Returns whether all can. Raises `NotAvailable`."""
    failures = install(_chosen(only, upgrade=upgrade))
    for failure in failures:
        print(f"{failure.peer}: {failure.reason}")
    return not failures


def _chosen(only: str, *, upgrade: bool) -> list[PeerServer]:
    """Return the peers with these names, whose environments are removed for an upgrade. Raises `NotAvailable`."""
    peers = chosen(only)
    if not peers:
        raise NotAvailable(f"no peer has a name with {only!r}")
    if upgrade:
        for peer in peers:
            environments.remove(peer)
    return peers
