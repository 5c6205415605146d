"""The growth: requests per second and CPU time per request by the number of connections, models or instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.ticker import FixedLocator, FuncFormatter

from bench.contenders import OURS
from bench.growth import CONNECTIONS, NOT_POLLING, Growth, GrowthPoint
from bench.pictures.style import BLUE, GREEN, RC, End, footnote, headline, label_ends, paper, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"http": ("HTTP", BLUE), "grpc": ("gRPC", GREEN)}
TITLES = {
    "connections": "connections, one model",
    "models": f"models, {CONNECTIONS} connections",
    "instances": f"instances, {CONNECTIONS} connections",
}


def draw_growth(growth: Growth) -> Figure:
    """Return the picture of a measurement, with a column for each axis of growth."""
    with mpl.rc_context(RC):
        figure = paper(6.2)
        rows = figure.subplots(
            2, len(TITLES), sharex="col", sharey="row",
            gridspec_kw={"left": 0.07, "right": 0.935, "bottom": 0.18, "top": 0.88, "wspace": 0.2, "hspace": 0.28},
        )  # fmt: skip
        for (axis, title), rate, cpu in zip(TITLES.items(), *rows, strict=True):
            points = [point for point in growth.points if point.axis == axis]
            _panel(rate, points, "rate")
            _panel(cpu, points, "server_cpu_us")
            plain(rate, "")
            plain(cpu, "")
            cpu.set_xlabel(title)
        rows[0][0].set_title("Requests per second", loc="left", fontsize=10.5)
        rows[1][0].set_title("CPU time of the server's main process per request", loc="left", fontsize=10.5)
        for axes, each in ((rows[0], _thousands), (rows[1], _microseconds)):
            axes[0].yaxis.set_major_formatter(FuncFormatter(each))
            axes[0].set_ylim(bottom=0)
            label_ends(axes[-1], _ends(growth.points, "rate" if each is _thousands else "server_cpu_us"))
        headline(figure, "What a request costs while the server grows", with_triton=bool(growth.triton))
        footnote(figure, *_settings(growth))
    return figure


def _panel(axes: Axes, points: list[GrowthPoint], name: str) -> None:
    for protocol, (_, colour) in COLOURS.items():
        for server in sorted({point.server for point in points}, reverse=True):  # ours on top of Triton's
            line = _line(points, protocol, server)
            counts, values = [p.count for p in line], [getattr(p, name) for p in line]
            if server == OURS:
                axes.plot(counts, values, color=colour, linewidth=2.2, marker="o", markersize=3.8, zorder=4)
            else:
                axes.plot(counts, values, color=colour, linewidth=1.4, dashes=(4, 2), alpha=0.75, zorder=3)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({point.count for point in points})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:g}"))


def _line(points: list[GrowthPoint], protocol: str, server: str) -> list[GrowthPoint]:
    return sorted((p for p in points if (p.protocol, p.server) == (protocol, server)), key=lambda p: p.count)


def _ends(points: list[GrowthPoint], name: str) -> list[End]:
    last = [point for point in points if point.axis == list(TITLES)[-1]]
    lines = [(text, colour, _line(last, protocol, OURS)) for protocol, (text, colour) in COLOURS.items()]
    return [End(line[-1].count, getattr(line[-1], name), text, colour) for text, colour, line in lines if line]


def _thousands(value: float, _: object) -> str:
    return f"{value / 1000:g}k" if value else "0"


def _microseconds(value: float, _: object) -> str:
    return f"{value:g} µs" if value else "0"


def _settings(growth: Growth) -> list[str]:
    rounds = f"medians of {growth.rounds} rounds of {growth.seconds:g} s in turn" if growth.rounds > 1 else "one round"
    against = f"; Triton {growth.triton}, Python backend, same files" if growth.triton else ""
    return [
        f"add_sub of 16 floats in Python{against}. Connections always have one request under way; models take turns.",
        f"Main process: Naiad's kernel, tritonserver. Client on the same machine: {growth.client}, {rounds}.",
        f"{growth.machine.line}. Naiad with {NOT_POLLING}.",
    ]
