"""The files of the page, which are part of the package. They load nothing from other hosts."""

from __future__ import annotations

import functools
from pathlib import Path

_FOLDER = Path(__file__).parent / "static"

#: The page, and what it loads, with their types.
PAGE = "index.html"
FILES = {
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript",
    "page.js": "text/javascript",
    "stream.js": "text/javascript",
    "models.js": "text/javascript",
    "detail.js": "text/javascript",
    "charts.js": "text/javascript",
    "example.js": "text/javascript",
    "tensors.js": "text/javascript",
    "pictures.js": "text/javascript",
    "samples.js": "text/javascript",
    "settings.js": "text/javascript",
}

#: Nothing but files of this server, no scripts and styles within the page, no frame around it, no form that leaves it,
#: and no text that becomes HTML.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)


@functools.cache
def content_of(name: str) -> bytes:
    """Return a file, which is `PAGE` or one of `FILES`. Blocks."""
    return (_FOLDER / name).read_bytes()
