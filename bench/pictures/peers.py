"""The peers: requests per second of each server, with one worker and with as many as there are cores, and CPU time.

Our server is first, the others follow in the order of their rates. A panel has a scale of its own.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import matplotlib as mpl
import msgspec
from matplotlib.patches import Patch

from bench.peers.command import PeerFigures, summarize
from bench.peers.rows import GRPC, LIGHT, PeerRow
from bench.peers.workloads import ADD_SUB, DIGITS, MEBIBYTE
from bench.pictures.style import BLUE, FAINT, INK, RC, SOFT, footnote, headline_of, paper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bench.peers.measurement import PeerDescription, PeerResults

    Figures = dict[tuple[str, int, str], PeerFigures]

OURS = "naiad"
#: Bars of one worker, and of as many as there are cores: ours and the others'.
OUR_COLOURS, THEIR_COLOURS = (BLUE, "#7fb8d8"), ("#6e7781", "#b9c0c7")
#: Behind our rows, and behind every second one of the others.
OUR_BAND, BAND = "#e9f3fa", "#f6f8fa"


class Panel(msgspec.Struct, frozen=True):
    """One load: what is drawn of it, and what stands where a server has no figures."""

    title: str
    unit: str
    row: PeerRow
    value: str
    absent: str = "none"


RATE, CPU = "rate", "cpu_us"

PANELS = [
    Panel("JSON, 16 floats", "32 clients", PeerRow(ADD_SUB, LIGHT, 32), RATE),
    Panel("ONNX classifier, JSON", "32 clients", PeerRow(DIGITS, LIGHT, 32), RATE, "has another backend"),
    Panel("1 MiB tensor", "4 clients", PeerRow(MEBIBYTE, LIGHT, 4), RATE),
    Panel("gRPC, 16 floats", "32 clients", PeerRow(ADD_SUB, GRPC, 32), RATE, "not its protocol"),
    Panel("CPU time of a request", "µs, JSON, less is better", PeerRow(ADD_SUB, LIGHT, 32), CPU),
]

#: The height of a bar, and inches: of a server, above the rows, and below them.
_BAR = 0.36
_ROW_IN, _TOP_IN, _BOTTOM_IN = 0.42, 0.98, 0.58

#: Bars longer than this many times the median are cut: one server that takes milliseconds would hide the others.
_CUT_AT = 2.5


def draw_peers(results: PeerResults) -> Figure:
    """Return the picture of a measurement."""
    figures = summarize(results.samples)
    servers = _in_order(results.peers, figures)
    counts = sorted({key[1] for key in figures})[: len(THEIR_COLOURS)]
    height = _TOP_IN + _ROW_IN * len(servers) + _BOTTOM_IN
    with mpl.rc_context(RC):
        figure = paper(height)
        panels = figure.subplots(
            1, len(PANELS), sharey=True, squeeze=False,
            gridspec_kw={"left": 0.128, "right": 0.99, "bottom": _BOTTOM_IN / height, "top": 1 - _TOP_IN / height,
                         "wspace": 0.06},
        )[0]  # fmt: skip
        for axes, panel in zip(panels, PANELS, strict=True):
            _frame(axes, panel, servers)
            _bars(axes, panel, servers, counts, figures)
        panels[0].set_ylim(len(servers) - 0.5, -0.5)
        _names(panels[0], servers)
        keys = [
            Patch(color=colour, label=_workers(count)) for count, colour in zip(counts, THEIR_COLOURS, strict=False)
        ]
        headline_of(figure, "Requests per second: Naiad beside other inference servers", keys)
        footnote(figure, *_settings(results, figures))
    return figure


def _in_order(peers: Sequence[PeerDescription], figures: Figures) -> list[PeerDescription]:
    """Return the peers that were measured: ours, then the others by their rates relative to the best of each panel."""
    rows = [panel.row.name for panel in PANELS if panel.value == RATE]
    best = {row: max((each.rate for key, each in figures.items() if key[2] == row), default=1.0) for row in rows}

    def place(peer: PeerDescription) -> float:
        found = [
            max(rates) / best[row]
            for row in rows
            if (rates := [each.rate for key, each in figures.items() if key[0] == peer.name and key[2] == row])
        ]
        return -math.inf if peer.name == OURS else -statistics.geometric_mean(found or [1e-9])

    return sorted((peer for peer in peers if any(key[0] == peer.name for key in figures)), key=place)


def _frame(axes: Axes, panel: Panel, servers: Sequence[PeerDescription]) -> None:
    """Draw what stands around and behind the bars of a panel."""
    axes.set_title(panel.title, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=16)
    axes.annotate(panel.unit, (0, 1), (0, 4), "axes fraction", "offset points", fontsize=7.8, color=SOFT)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(FAINT)
    axes.tick_params(length=0)
    axes.set_xticks([])
    for place, server in enumerate(servers):
        if server.name == OURS or place % 2 == 0:
            axes.axhspan(
                place - 0.5, place + 0.5, color=OUR_BAND if server.name == OURS else BAND, zorder=0, linewidth=0
            )


def _bars(
    axes: Axes, panel: Panel, servers: Sequence[PeerDescription], counts: Sequence[int], figures: Figures
) -> None:
    values = {key[:2]: getattr(each, panel.value) for key, each in figures.items() if key[2] == panel.row.name}
    longest = max(values.values(), default=1.0)
    if panel.value == CPU and values:
        longest = min(longest, _CUT_AT * statistics.median(values.values()))
    for place, server in enumerate(servers):
        has = [count for count in counts if (server.name, count) in values]
        if not has:
            axes.text(longest * 0.03, place, panel.absent, va="center", fontsize=7, color=SOFT, style="italic")
        for number, workers in enumerate(counts):
            if not has:
                continue
            at = place + (number - (len(counts) - 1) / 2) * _BAR
            value = values.get((server.name, workers))
            if value is None:
                axes.text(longest * 0.03, at, "failed", va="center", fontsize=6.5, color=SOFT, style="italic")
                continue
            ours = server.name == OURS
            length = end = min(value, longest)
            axes.barh(at, length, _BAR * 0.9, color=(OUR_COLOURS if ours else THEIR_COLOURS)[number], zorder=2)
            if value > longest:
                _cut(axes, length, at)
            each = figures[server.name, workers, panel.row.name]
            if panel.value == RATE and each.highest > each.lowest:
                axes.plot([each.lowest, each.highest], [at, at], color=INK, linewidth=0.8, zorder=3)
                end = each.highest
            axes.text(
                end + longest * 0.03, at, f"{value:,.0f}", va="center", fontsize=7.2,
                color=BLUE if ours else INK, fontweight="bold" if ours else "normal",
            )  # fmt: skip
    axes.set_xlim(0, longest * 1.36)


def _cut(axes: Axes, length: float, at: float) -> None:
    """Mark a bar as longer than it is drawn."""
    for shift in (0.90, 0.93):
        axes.plot(
            [length * (shift - 0.015), length * (shift + 0.015)], [at + _BAR / 2, at - _BAR / 2],
            color="white", linewidth=1.6, zorder=3,
        )  # fmt: skip


def _names(axes: Axes, servers: Sequence[PeerDescription]) -> None:
    """Write names and versions of the servers to the left of the first panel."""
    axes.set_yticks([])
    for place, peer in enumerate(servers):
        ours = peer.name == OURS
        version = next(iter(peer.versions.values()), "this commit" if ours else "")
        axes.text(
            -0.05, place - 0.02, peer.title, transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=9,
            color=BLUE if ours else INK, fontweight="bold" if ours else "normal",
        )  # fmt: skip
        axes.text(
            -0.05, place + 0.04, version, transform=axes.get_yaxis_transform(), ha="right", va="top", fontsize=7,
            color=SOFT,
        )  # fmt: skip


def _workers(count: int) -> str:
    return "one worker" if count == 1 else f"{count} workers"


def _settings(results: PeerResults, figures: Figures) -> list[str]:
    rounds = max((each.rounds for each in figures.values()), default=0)
    measured = f"Medians of {rounds} rounds in turn, {results.seconds} s each; thin lines: lowest to highest"
    if rounds == 1:
        measured = f"One round of {results.seconds} s"
    return [
        f"{measured}. Each server with the settings that its documentation recommends; cut bars are longer.",
        f"Clients on the same machine: {results.clients}. {results.machine.line}.",
    ]
