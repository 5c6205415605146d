"""The documents as a site, which `make docs` builds into `build/docs`. The reasons are in docs/decisions/the-site.md.

The source folder is the root of the repository: documents are pages where they are, and links between them work in the
same way on a code host. `NAVIGATION` is the order in which a newcomer reads.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "kernel" / "importable")]

from navigation import NAVIGATION  # type: ignore[import-not-found]  # noqa: E402 - beside this file

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Naiad"
copyright = "the authors of Naiad"
html_title = "Naiad"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "source_pages", "docstrings"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
include_patterns += [f"{folder}/**.md" for folder in ("bench", "docs")]
exclude_patterns = ["build", "dist", ".*", "**/node_modules", "tests"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence"]
# The blocks of a document without a language are drawings and outputs.
highlight_language = "none"
pygments_style = "friendly"
pygments_dark_style = "github-dark"

autodoc_default_options = {"undoc-members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autoclass_content = "both"
smartquotes = False
autodoc_preserve_defaults = True
# In docstrings, one backtick is code, and a link if a name of the reference is meant.
default_role = "py:obj"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["naiad.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options: dict[str, object] = {"top_of_page_buttons": []}


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the pages below `docname` to it, in an invisible list: readers on a code host do not see it."""
    for caption, pages in NAVIGATION.get(docname, ()):
        lines = "\n".join(f"/{page}" for page in pages)
        heading = f":caption: {caption}\n" if caption else ""
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n{heading}\n{lines}\n```\n"


def read_as_code_hosts_do(app: Sphinx, docname: str, source: list[str]) -> None:
    """Blocks in other languages than Pygments knows are highlighted as what they resemble."""
    source[0] = re.sub(r"^```pbtxt$", "```protobuf", source[0], flags=re.MULTILINE)


def write_index(app: Sphinx, error: Exception | None) -> None:
    """Let the site's first page be found under the name that browsers and servers look for."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("source-read", read_as_code_hosts_do)
    app.connect("build-finished", write_index)
