"""`python -m bench peers`: which peers are measured, what is kept of the last run, and the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench import store
from bench.peers import environments
from bench.peers.measurement import PeerResults, chosen, measure, merged, worker_counts
from bench.peers.table import print_table
from bench.triton import NotAvailable

if TYPE_CHECKING:
    from pathlib import Path


def run(
    only: str,
    rounds: int,
    workers: int | None,
    last: Path | None,
    *,
    connections: bool,
    seconds: int,
    upgrade: bool,
) -> PeerResults:
    """Measure, print the table, and return the results, with those of the file `last` if it is given and exists.

    Raises `NotAvailable` if no peer has that name.
    """
    peers = chosen(only)
    if not peers:
        raise NotAvailable(f"no peer has a name with {only!r}")
    if upgrade:
        for peer in peers:
            environments.remove(peer)
    connections = connections and any(peer.name == "naiad" for peer in peers)
    results = measure(peers, worker_counts(workers), rounds, seconds, connections=connections)
    if last is not None and last.exists():
        results = merged(store.read_json(last, PeerResults), results)
    print_table(results)
    return results
