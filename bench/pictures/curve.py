"""The curve: latency with one client and throughput with four, by the size of the tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from bench.contenders import OURS
from bench.curve import KIB, LATENCY_CLIENTS, MIB, SIZES, THROUGHPUT_CLIENTS, Curve, CurvePoint, size_name
from bench.pictures.style import (
    BLUE,
    FAINT,
    GREEN,
    PAPER,
    PURPLE,
    RC,
    SOFT,
    VERMILLION,
    End,
    footnote,
    headline,
    label_ends,
    paper,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"JSON": VERMILLION, "HTTP, binary": BLUE, "gRPC": GREEN, "shared memory": PURPLE}

#: Diagonals of the throughput panel, one for each rate in requests per second, and the size at which its label is: far
#: from every curve.
RATES = {1: 16 * MIB, 10: 4 * MIB, 100: 32 * MIB, 1_000: 7 * KIB, 10_000: 1.5 * MIB}


def draw_curve(curve: Curve) -> Figure:
    """Return the picture of a measurement."""
    with mpl.rc_context(RC):
        figure = paper(5.2)
        latency, throughput = figure.subplots(
            1, 2, gridspec_kw={"left": 0.062, "right": 0.885, "bottom": 0.212, "top": 0.86, "wspace": 0.53}
        )
        _panel(latency, curve, LATENCY_CLIENTS, lambda p: (p.p50_us / 1e3, p.p99_us / 1e3))
        plain(latency, _latency_title(curve))
        latency.yaxis.set_major_formatter(FuncFormatter(_milliseconds))
        _panel(throughput, curve, THROUGHPUT_CLIENTS, lambda p: (p.bytes_per_s / 1e6, None))
        plain(throughput, "Throughput with four clients; diagonals: requests/s")
        throughput.yaxis.set_major_formatter(FuncFormatter(_megabytes))
        _diagonals(throughput)
        headline(figure, "What a tensor's size costs, by the way it travels", with_triton=bool(curve.triton))
        footnote(figure, *_settings(curve))
    return figure


def _panel(axes: Axes, curve: Curve, clients: int, value: Callable[[CurvePoint], tuple[float, float | None]]) -> None:
    ends: list[End] = []
    for name, colour in COLOURS.items():
        for server in sorted({point.server for point in curve.points}, reverse=True):  # ours on top of Triton's
            line = sorted(
                (p for p in curve.points if (p.transport, p.server, p.clients) == (name, server, clients)),
                key=lambda p: p.byte_size,
            )
            if not line:
                continue
            sizes = [p.byte_size for p in line]
            middle = [value(p)[0] for p in line]
            upper = [above for p in line if (above := value(p)[1]) is not None]
            if server == OURS:
                axes.plot(sizes, middle, color=colour, linewidth=2.2, marker="o", markersize=3.4, zorder=4)
                ends.append(End(sizes[-1], middle[-1], name, colour))
            else:
                axes.plot(sizes, middle, color=colour, linewidth=1.4, dashes=(4, 2), alpha=0.75, zorder=3)
            if upper and server == OURS:
                axes.fill_between(sizes, middle, upper, color=colour, alpha=0.14, linewidth=0, zorder=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({point.byte_size for point in curve.points})
    axes.xaxis.set_major_locator(FixedLocator([size for size in sizes if size in SIZES[::2]]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_name(int(size))))
    axes.yaxis.set_major_locator(LogLocator(base=10))
    axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    axes.set_xlabel("size of the tensor, as much in as out")
    # JSON ends early: its name is at its end, where it has no neighbours
    for last in {end.x for end in ends}:
        label_ends(axes, [end for end in ends if end.x == last])


def _diagonals(axes: Axes) -> None:
    """Draw lines of equal rate: the throughput is the rate times the size."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    (x0, y0), (x1, y1) = axes.transData.transform([(left, left), (left * 16, left * 16)])
    slope = math.degrees(math.atan2(y1 - y0, x1 - x0))
    for rate, size in RATES.items():
        axes.plot((left, right), (rate * left / 1e6, rate * right / 1e6), color=FAINT, linewidth=1.1, zorder=1)
        axes.text(
            size, rate * size / 1e6, f"{rate:,}/s", rotation=slope, fontsize=7.5, color=SOFT, ha="center",
            va="center", clip_on=True, zorder=1, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2},
        )  # fmt: skip


def _latency_title(curve: Curve) -> str:
    return "Latency with one client: median" + (", shaded to Naiad's p99" if curve.triton else ", shaded to p99")


def _milliseconds(value: float, _: object) -> str:
    return f"{value:g} ms" if value >= 1 else f"{value * 1000:g} µs"


def _megabytes(value: float, _: object) -> str:
    return f"{value / 1000:g} GB/s" if value >= 1000 else f"{value:g} MB/s"


def _settings(curve: Curve) -> list[str]:
    rounds = f"medians of {curve.rounds} rounds in turn" if curve.rounds > 1 else "one round"
    against = f"; the same file in Triton {curve.triton} with its Python backend" if curve.triton else ""
    return [
        f"Identity model in Python, FP32, one instance, dynamic batching{against}.",
        "JSON: random numbers, 20 bytes each. "
        f"Shared memory: POSIX regions, requests over gRPC. Client on the same machine: {curve.client}, {rounds}.",
        f"{curve.machine.line}.",
    ]
