"""The peers: requests per second of each server, with one worker and with as many as there are cores, and CPU time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.patches import Patch

from bench.peers.rows import GRPC, LIGHT, PeerRow
from bench.peers.table import PeerFigures, summarize
from bench.peers.workloads import ADD_SUB, DIGITS, MEBIBYTE
from bench.pictures.style import BLUE, FAINT, INK, RC, SOFT, footnote, headline_of, paper, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bench.peers.measurement import PeerResults

OURS = "naiad"
#: Bars of one worker, and of as many as there are cores: ours and those of the others.
OUR_COLOURS, THEIR_COLOURS = (BLUE, "#7fb8d8"), ("#6e7781", "#c4cad0")

PANELS = [
    ("JSON, 16 floats,\n32 clients", PeerRow(ADD_SUB, LIGHT, 32), "rate"),
    ("ONNX classifier, JSON,\n32 clients", PeerRow(DIGITS, LIGHT, 32), "rate"),
    ("1 MiB tensor,\n4 clients", PeerRow(MEBIBYTE, LIGHT, 4), "rate"),
    ("gRPC, 16 floats,\n32 clients", PeerRow(ADD_SUB, GRPC, 32), "rate"),
    ("CPU per request, µs:\nJSON, 32 clients", PeerRow(ADD_SUB, LIGHT, 32), "cpu_us"),
]

_BAR = 0.38


def draw_peers(results: PeerResults) -> Figure:
    """Return the picture of a measurement."""
    figures = summarize(results.samples)
    servers = [peer for peer in results.peers if any(key[0] == peer.name for key in figures)]
    counts = sorted({key[1] for key in figures})
    with mpl.rc_context(RC):
        figure = paper(1.9 + 0.36 * len(servers))
        height = 1.9 + 0.36 * len(servers)
        panels = figure.subplots(
            1, len(PANELS), sharey=True, squeeze=False,
            gridspec_kw={"left": 0.13, "right": 0.95, "bottom": 0.78 / height, "top": 1 - 0.95 / height,
                         "wspace": 0.4},
        )[0]  # fmt: skip
        for axes, (title, row, value) in zip(panels, PANELS, strict=True):
            _panel(axes, [peer.name for peer in servers], counts, row.name, value, figures)
            plain(axes, title)
            axes.title.set_fontsize(9.5)
            axes.grid(visible=False)
            axes.spines["bottom"].set_visible(False)
            axes.set_xticks([])
        first = panels[0]
        first.set_yticks(range(len(servers)), [peer.title for peer in servers])
        first.invert_yaxis()
        for label, peer in zip(first.get_yticklabels(), servers, strict=True):
            label.set_color(BLUE if peer.name == OURS else INK)
            label.set_fontweight("bold" if peer.name == OURS else "normal")
        first.tick_params(axis="y", labelsize=9.5)
        keys = [
            Patch(color=colour, label=_workers(count)) for count, colour in zip(counts, THEIR_COLOURS, strict=False)
        ]
        headline_of(figure, "Requests per second, beside other servers", keys)
        footnote(figure, *_settings(results))
    return figure


def _panel(
    axes: Axes, servers: list[str], counts: list[int], row: str, value: str,
    figures: dict[tuple[str, int, str], PeerFigures],
) -> None:  # fmt: skip
    best = max((getattr(each, value) for key, each in figures.items() if key[2] == row), default=1.0)
    if value == "cpu_us":  # one server that takes milliseconds would hide the others
        ordered = sorted(getattr(each, value) for key, each in figures.items() if key[2] == row)
        best = min(best, 4 * ordered[len(ordered) // 2]) if ordered else best
    for place, server in enumerate(servers):
        measured = False
        for number, workers in enumerate(counts[: len(THEIR_COLOURS)]):
            each = figures.get((server, workers, row))
            if each is None:
                continue
            measured = True
            at = place + (number - (len(counts) - 1) / 2) * _BAR
            length = getattr(each, value)
            colour = (OUR_COLOURS if server == OURS else THEIR_COLOURS)[number]
            axes.barh(at, min(length, best), _BAR * 0.92, color=colour)
            if value == "rate":
                axes.plot([each.lowest, each.highest], [at, at], color=INK, linewidth=0.7)
            end = min(max(length, each.highest if value == "rate" else 0), best)
            axes.text(end + best * 0.025, at, f"{length:,.0f}", va="center", fontsize=7, color=INK)
        if not measured:
            axes.text(best * 0.025, place, "-", va="center", fontsize=8, color=SOFT)
    axes.axvline(0, color=FAINT, linewidth=1)
    axes.set_xlim(0, best * 1.02)


def _workers(count: int) -> str:
    return "one worker" if count == 1 else f"{count} workers"


def _settings(results: PeerResults) -> list[str]:
    versions = [f"{peer.title} {next(iter(peer.versions.values()))}" for peer in results.peers if peer.versions]
    half = (len(versions) + 1) // 2
    rounds = max((each.rounds for each in summarize(results.samples).values()), default=0)
    measured = f"Medians of {rounds} rounds in turn, {results.seconds} s each; thin lines: lowest to highest"
    if rounds == 1:
        measured = f"One round of {results.seconds} s"
    return [
        f"{measured}. Clients on the same machine: {results.clients}. Each server with its recommended settings.",
        f"{', '.join(versions[:half])},",
        f"{', '.join(versions[half:])}.",
        f"{results.machine.line}.",
    ]
