"""Pages with the source of the files that documents name, and links to them.

A path of a file in backticks becomes a link to the page of the file. A link of a document to a file of the repository
that is no document leads there, too; if its text is a name in backticks, such as a function, to the line that defines
it. So the documents themselves need no numbers of lines.
"""

from __future__ import annotations

import ast
import html
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pygments
from docutils import nodes
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

#: Files of other kinds, such as pictures, are copied as they are.
SHOWN = (".py", ".proto", ".toml", ".yaml", ".json", ".js", ".css", ".html", ".service", ".lock", ".pbtxt", ".txt")
SHOWN_NAMES = ("LICENSE", "NOTICE", "Makefile", "Containerfile", "run")

#: Larger files are no reading, and make the site slow.
MOST_BYTES = 300_000


def is_shown(root: Path, path: str) -> bool:
    """Whether `path`, from the root of the repository, is a file that gets a page."""
    file = root / path
    named = path.endswith(SHOWN) or file.name in SHOWN_NAMES
    return named and not path.startswith("/") and file.is_file() and file.stat().st_size <= MOST_BYTES


def line_of(file: Path, name: str) -> int | None:
    """Return the line of a Python file that defines a function or class; `name` may be `Class.method`."""
    if file.suffix != ".py":
        return None
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    line = None
    for part in name.removesuffix("()").split("."):
        found = next((each for each in body if getattr(each, "name", None) == part), None)
        if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return None
        body, line = found.body, found.lineno
    return line


class LinkSources(SphinxTransform):  # type: ignore[misc]  # Sphinx is only there for `make docs`
    """Makes links of what names a file: they are resolved when the pages are written."""

    default_priority = 200

    def apply(self, **kwargs: Any) -> None:
        root = Path(self.env.srcdir)
        here = os.path.dirname(self.env.docname)
        for link in list(self.document.findall(addnodes.download_reference)):
            path = os.path.normpath(os.path.join(here, link["reftarget"]))
            if is_shown(root, path):
                link.replace_self(self._link(path, link.astext(), link.children))
        for span in list(self.document.findall(nodes.literal)):
            if not isinstance(span.parent, (nodes.reference, addnodes.pending_xref)) and is_shown(root, span.astext()):
                span.replace_self(self._link(span.astext(), "", [span.deepcopy()]))

    def _link(self, path: str, text: str, children: list[nodes.Node]) -> addnodes.pending_xref:
        link = addnodes.pending_xref("", refdomain="", reftype="source", reftarget=path, refdoc=self.env.docname)
        link["line"] = line_of(Path(self.env.srcdir) / path, text)
        content = nodes.inline(classes=["source-link"])
        content += children
        link += content
        return link


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Return the link to the page of a file, and remember that it needs one."""
    if node["reftype"] != "source":
        return None
    path = node["reftarget"]
    named: set[str] = app.env.__dict__.setdefault("named_sources", set())
    named.add(path)
    uri = app.builder.get_relative_uri(node["refdoc"], page_of(path))
    return nodes.reference("", "", content, internal=True, refuri=uri + (f"#L-{node['line']}" if node["line"] else ""))


def page_of(path: str) -> str:
    return f"source/{path}"


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the page of each file that a document names."""
    for path in sorted(app.env.__dict__.get("named_sources", ())):
        text = (Path(app.srcdir) / path).read_text(encoding="utf-8")
        try:
            lexer = get_lexer_for_filename(path)
        except ClassNotFound:
            lexer = TextLexer()
        lines = pygments.highlight(text, lexer, HtmlFormatter(cssclass="highlight source", linespans="L"))
        body = f"<h1>{html.escape(path)}</h1>\n{lines}"
        yield page_of(path), {"title": path, "body": body, "parents": []}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(LinkSources)
    app.connect("missing-reference", resolve)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
