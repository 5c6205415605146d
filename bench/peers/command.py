"""`python -m bench peers`: which peers are measured, what is kept of the last run, and the table.

The table has rates with their spread, CPU time, and what was set for each peer.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from bench import store
from bench.peers.connections import verdicts
from bench.peers.measurement import PeerResults, chosen, install, measure, merged, worker_counts
from bench.peers.peer import remove_environment
from bench.peers.rows import ROWS
from bench.peers.servers.trees import GOALS, TREE_PEERS
from bench.triton import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.peers.connections import ConnectionPoint
    from bench.peers.peer import PeerServer
    from bench.peers.rows import PeerSample


class PeerFigures(msgspec.Struct, frozen=True):
    """Medians of the rounds of a row on a peer, and its lowest and highest rate."""

    rate: float
    lowest: float
    highest: float
    p50_us: float
    p99_us: float
    cpu_us: float
    rounds: int

    @property
    def spread(self) -> float:
        """Half of the distance between the lowest and the highest rate, as a part of the median."""
        return (self.highest - self.lowest) / 2 / self.rate if self.rate else 0.0


def summarize(samples: Sequence[PeerSample]) -> dict[tuple[str, int, str], PeerFigures]:
    """Return the figures by peer, workers and row."""
    groups: dict[tuple[str, int, str], list[PeerSample]] = {}
    for sample in samples:
        groups.setdefault((sample.peer, sample.workers, sample.row), []).append(sample)
    return {key: _figures(group) for key, group in groups.items()}


def _figures(group: list[PeerSample]) -> PeerFigures:
    rates = [sample.rate for sample in group]
    p50_us, p99_us, cpu_us = (
        statistics.median(getattr(sample, name) for sample in group) for name in ("p50_us", "p99_us", "cpu_us")
    )
    return PeerFigures(statistics.median(rates), min(rates), max(rates), p50_us, p99_us, cpu_us, len(group))


def print_table(results: PeerResults) -> None:
    """Print a table for each row, our server by connections, what was set, and what could not be measured."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    figures = summarize(results.samples)
    for row in ROWS:
        if any(key[2] == row.name for key in figures):
            console.print(_row_table(row.name, results, figures))
    if results.connections:
        console.print(_connections_table(results.connections))
        for line in verdicts(results.connections):
            console.print(line, highlight=False)
    for line in (*_settings(results), *_failures(results)):
        console.print(line, highlight=False, markup=False)
    console.print(f"{results.clients}; {results.machine.line}.", highlight=False)


def _row_table(row: str, results: PeerResults, figures: dict[tuple[str, int, str], PeerFigures]) -> Table:
    table = Table(title=row, title_justify="left")
    for name in ("server", "workers", "requests/s", "±", "p50 us", "p99 us", "CPU us per request", "rounds"):
        table.add_column(name, justify="left" if name == "server" else "right", no_wrap=True)
    for peer in results.peers:
        for workers in sorted({key[1] for key in figures if key[0] == peer.name and key[2] == row}):
            each = figures[peer.name, workers, row]
            table.add_row(
                peer.title, str(workers), f"{each.rate:,.0f}", f"{each.spread:.0%}", f"{each.p50_us:,.0f}",
                f"{each.p99_us:,.0f}", f"{each.cpu_us:,.0f}", str(each.rounds),
            )  # fmt: skip
    return table


def _connections_table(points: Sequence[ConnectionPoint]) -> Table:
    table = Table(title="Naiad by connections: add_sub in JSON, one worker", title_justify="left")
    for name in ("", "connections", "requests ahead", "requests/s", "p50 us", "p99 us", "failures"):
        table.add_column(name, justify="right" if name not in ("", "failures") else "left", no_wrap=name != "failures")
    for point in points:
        table.add_row(
            point.line, str(point.connections), str(point.depth), f"{point.rate:,.0f}", f"{point.p50_us:,.0f}",
            f"{point.p99_us:,.0f}", "; ".join(point.failures),
        )  # fmt: skip
    return table


def _settings(results: PeerResults) -> list[str]:
    lines: list[str] = []
    for peer in results.peers:
        versions = ", ".join(f"{name} {version}" for name, version in peer.versions.items())
        lines.append(f"{peer.title} ({versions or results.machine.commit}): {peer.settings}. See {peer.source}")
    return lines


def _failures(results: PeerResults) -> list[str]:
    lines: list[str] = []
    for failure in results.failures:
        what = f"{failure.peer} x{failure.workers}, {failure.row}" if failure.row else f"{failure.peer} was skipped"
        if not failure.row and failure.workers:
            what += f" with {failure.workers} workers"
        lines.append(f"{what}: {failure.reason}")
    return lines


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
    """Measure, print the table, and return the results, with the results of the file `last` if it is given and exists.

    Raises `NotAvailable` if no peer has that name.
    """
    peers = _chosen(only, upgrade=upgrade)
    connections = connections and any(peer.name == "naiad" for peer in peers)
    results = measure(peers, worker_counts(workers), rounds, seconds, connections=connections, limit_s=limit_s)
    if last is not None and last.exists():
        results = merged(store.read_json(last, PeerResults), results)
    print_table(results)
    return results


def run_trees(rounds: int, workers: int, *, seconds: int) -> PeerResults:
    """Measure the servers of XGBoost models, and print the table and whether the goals are reached."""
    results = measure(TREE_PEERS, [workers], rounds, seconds, connections=False)
    print_table(results)
    for line in tree_verdicts(summarize(results.samples)):
        print(line)
    return results


def tree_verdicts(figures: Mapping[tuple[str, int, str], PeerFigures]) -> list[str]:
    """Return a line for each row and server that ours is compared with: the ratios, and whether they reach the goals.

    A goal of p99 is reached where ours is at most that part of the other's.
    """
    lines: list[str] = []
    for (name, workers, row), theirs in figures.items():
        ours = figures.get((TREE_PEERS[0].name, workers, row))
        if name not in GOALS or ours is None:
            continue
        rate, p99 = ours.rate / theirs.rate, theirs.p99_us / ours.p99_us
        wanted_rate, wanted_p99 = GOALS[name]
        reached = rate >= wanted_rate and p99 >= wanted_p99
        wanted = f"{wanted_rate:g}{f' and {wanted_p99:g}' if wanted_p99 else ''}"
        lines.append(
            f"{row}, {name}: {rate:.1f} times the requests per second, p99 {p99:.1f} times shorter "
            f"({'reached' if reached else 'NOT REACHED'}: {wanted})"
        )
    return lines


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
            remove_environment(peer)
    return peers
