"""Prints the figures of `bench density`, and whether the goals are reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.contenders import OURS, TRITON
from bench.density.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.density.figures import Density, DensityPoint

MIB = 1 << 20


def print_table(density: Density) -> None:
    """Print all points, the restarts, and what was left out."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    titles = {kind.name: kind.title for kind in KINDS}
    table = Table(title="Many models", caption=density.machine.line)
    for name in ("models", "server", "ready, s", "workers", "a worker, private", "a worker, proportional",
                 "main process", "all, proportional", "HTTP/s", "gRPC/s"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("models", "server") else "right", no_wrap=True)
    for point in density.points:
        footprint = point.footprint
        table.add_row(
            f"{point.models} x {titles.get(point.kind, point.kind)}", point.server, f"{point.ready_s:.2f}",
            str(footprint.worker_count), mib(footprint.worker_private), mib(footprint.worker_proportional),
            mib(footprint.main.proportional), mib(footprint.together.proportional),
            *(f"{point.rates.get(protocol, 0):,.0f}" for protocol in ("http", "grpc")),
        )  # fmt: skip
    console.print(table)
    for line in (*ratios(density.points), *_restart_lines(density), *(f"left out: {each}" for each in density.skipped)):
        console.print(line, highlight=False)


def mib(byte_size: int) -> str:
    """Return a size as text; empty for none."""
    return f"{byte_size / MIB:.1f} MiB" if byte_size else ""


def ratios(points: Sequence[DensityPoint]) -> list[str]:
    """Return a line for each point that both servers have: our time and memory as a part of Triton's."""
    theirs = {(point.kind, point.models): point for point in points if point.server == TRITON}
    lines: list[str] = []
    for ours in points:
        triton = theirs.get((ours.kind, ours.models))
        if ours.server != OURS or triton is None:
            continue
        time = ours.ready_s / triton.ready_s
        memory = ours.footprint.together.proportional / triton.footprint.together.proportional
        lines.append(
            f"{ours.models} x {ours.kind}: ready in {time:.2f} of Triton's time, with {memory:.2f} of its memory"
        )
    return lines


def _restart_lines(density: Density) -> list[str]:
    restarts = density.restarts
    if restarts is None:
        return []
    return [
        f"restart of a killed worker: {restarts.median_ms:.1f} ms until the next response, of which the load of the "
        f"model took {restarts.median_load_ms:.1f} ms (medians of {len(restarts.total_ms)})"
    ]
