"""Writes each drawing of this folder as SVG: `make drawings`, or `python docs/drawings/draw.py`.

A drawing is a TOML file with boxes and arrows. The SVG has no fonts and no scripts of its own, and follows the reader's
choice of a light or dark page. tests/docs/test_site.py fails if an SVG is not what its source makes.
"""

from __future__ import annotations

import tomllib
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

#: About how wide a character is, relative to its font size: a text may not be wider than its box.
CHARACTER = 0.53
TITLE, TEXT = 15, 13
LINE = 18
GAP = 10

STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 15px }
  .name { font-weight: 600 }
  .note, .label { fill: #57606a }
  .client { fill: #fff4e5; stroke: #d08a2e }
  .process { fill: #eef4ff; stroke: #3b6fd4 }
  .behind { fill: #eef4ff; stroke: #3b6fd4; opacity: 0.5 }
  .small { fill: #f3f0ff; stroke: #7a5fd0 }
  .memory { fill: #ecf8f0; stroke: #2f8f5b }
  .part, .cell { fill: #ffffff; stroke: none }
  .arrow { stroke: #57606a; stroke-width: 1.5; fill: none }
  .head { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22; stroke: #30363d }
    text { fill: #e6edf3 }
    .note, .label { fill: #9da7b3 }
    .client { fill: #3a2a12 }
    .process, .behind { fill: #14233f }
    .small { fill: #241d3f }
    .memory { fill: #12301f }
    .part, .cell { fill: #0d1117 }
    .arrow { stroke: #9da7b3 }
    .head { fill: #9da7b3 }
  }
"""

HEAD = (
    '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="head" d="M0 0 10 5 0 10z"/></marker>'
)


def draw(source: str) -> str:
    """Return the SVG of a drawing. Raises `ValueError` for a text that does not fit into its box."""
    drawing = tomllib.loads(source)
    width, height = drawing["width"], drawing["height"]
    parts = [part for box in drawing["box"] for part in box_lines(box)]
    parts += [part for arrow in drawing["arrow"] for part in arrow_lines(arrow)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(drawing['title'])}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{HEAD}</defs>",
            f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def box_lines(box: dict[str, Any]) -> list[str]:
    """Return the elements of a box: title and note are at its top, the other lines below, or in the middle."""
    x, y, width, height = box["at"]
    radius = 4 if box["kind"] in ("part", "cell") else 8
    parts = [f'<rect class="{box["kind"]}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>']
    lines = box.get("lines", [])
    top = y + 23
    if "title" in box:
        parts.append(text(x + 14, top, [(box["title"], "title"), (box.get("note", ""), "note")], width - 28))
        top += LINE + 2
    else:
        top = y + (height - LINE * len(lines)) // 2 + 13
    for number, line in enumerate(lines):
        name, _, rest = line.rpartition("   ")
        parts.append(text(x + 14, top + LINE * number, [(name, "name"), (rest, "line")], width - 28))
    return parts


def arrow_lines(arrow: dict[str, Any]) -> list[str]:
    """Return the line with its heads, and the label to the right of its middle."""
    points = arrow["points"]
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    start = ' marker-start="url(#head)"' if arrow.get("both") else ""
    parts = [f'<path class="arrow" d="{path}" marker-end="url(#head)"{start}/>']
    if "label" in arrow:
        [(x, y), (to_x, to_y)] = next(pairwise(points))
        parts.append(text((x + to_x) // 2 + 12, (y + to_y) // 2 + 4, [(arrow["label"], "label")], 460))
    return parts


def text(x: int, y: int, pieces: list[tuple[str, str]], room: int) -> str:
    """Return one line of pieces with a class each; `room` is in pixels."""
    shown = [(words, kind) for words, kind in pieces if words]
    needed = sum(len(words) * (TITLE if kind == "title" else TEXT) * CHARACTER for words, kind in shown)
    needed += GAP * (len(shown) - 1)
    if needed > room:
        raise ValueError(f"'{shown[-1][0]}' ends {needed:.0f} pixels after the begin of its line, which has {room}")
    gap = f' dx="{GAP}"'
    spans = [
        f'<tspan class="{kind}"{gap if number else ""}>{escape(words)}</tspan>'
        for number, (words, kind) in enumerate(shown)
    ]
    return f'<text x="{x}" y="{y}">{"".join(spans)}</text>'


def main() -> None:
    for source in sorted(FOLDER.glob("*.toml")):
        source.with_suffix(".svg").write_text(draw(source.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
