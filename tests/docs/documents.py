"""The documents of the repository: their text, code blocks, links and tables."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

#: Where programs of the documents find our packages, and the public module `naiad`.
PYTHONPATH = os.pathsep.join(map(str, (ROOT, ROOT / "kernel" / "importable")))

#: Written for readers of the repository. All rules are for these.
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)

#: These have paths and links too.
ALL_DOCUMENTS = [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "bench" / "README.md"]

#: What a user of Grafana imports.
DASHBOARD = ROOT / "docs" / "monitoring" / "grafana-dashboard.json"

_FENCED = re.compile(r"^(`{3})(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
_CODE_SPAN = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class CodeBlock(NamedTuple):
    """A fenced block; `language` is empty where it has none."""

    language: str
    text: str


def name_of(path: Path) -> str:
    """Return the path of a document from the root of the repository."""
    return str(path.relative_to(ROOT))


def document(name: str) -> str:
    """Return the text of a document by its path from the root of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def code_blocks(text: str, language: str | None = None) -> list[CodeBlock]:
    """Return the fenced blocks, or those of one language."""
    found = [CodeBlock(match[2], match[3]) for match in _FENCED.finditer(text)]
    return [block for block in found if language is None or block.language == language]


def prose(text: str) -> str:
    """Return what is not code, with the targets of links taken out."""
    without_blocks = _INDENTED.sub("\n", _FENCED.sub("\n", text))
    return _LINK.sub("]", _CODE_SPAN.sub("CODE", without_blocks))


def links(text: str) -> list[str]:
    """Return the targets of links and pictures."""
    return _LINK.findall(_FENCED.sub("\n", text))


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = _HEADING.findall(_FENCED.sub("\n", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading of the same or a higher level."""
    match = re.search(rf"^(#+) {re.escape(heading)}\n", text, re.MULTILINE)
    assert match is not None, f"no heading '{heading}'"
    rest = text[match.end() :]
    following = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: following.start()] if following else rest


def table(text: str) -> list[list[str]]:
    """Return the cells of the rows of the tables in `text`, without their headings."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    rulers = [number for number, row in enumerate(cells) if set("".join(row)) <= set("-: ") and "".join(row)]
    skipped = {*rulers, *(number - 1 for number in rulers)}
    return [row for number, row in enumerate(cells) if number not in skipped]


def code_spans(text: str) -> list[str]:
    """Return what stands in backticks in `text`."""
    return [match[0].strip("`") for match in _CODE_SPAN.finditer(text)]
