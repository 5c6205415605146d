"""GET /docs: the OpenAPI document of the server as a page of Swagger UI, from the files of a Python package.

The page loads nothing from other hosts. Without the package (`pip install naiad-server[docs]`) it says how to get it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from protocols.http import web
from protocols.http.responses import SERVER_HEADER

if TYPE_CHECKING:
    from protocols.http.call import HttpCall

PAGE_PATH = "/docs"

#: Has Swagger UI in its folder `dist`. It is not imported: that would need Flask.
_PACKAGE = "flask_swagger_ui"

#: Files of Swagger UI that the page needs, with their types.
FILES = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}

#: Begins Swagger UI. A file of its own, so that the page may forbid scripts inside it.
SCRIPT = "naiad.js"

_SCRIPT_TEXT = b"""window.onload = () => SwaggerUIBundle({
  url: "/v2/openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  docExpansion: "none",
  validatorUrl: null,
});
"""

_PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Naiad</title>
<link rel="icon" type="image/png" href="/docs/favicon-32x32.png">
<link rel="stylesheet" href="/docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/naiad.js"></script>
</body>
</html>
"""

_NO_PACKAGE = b"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Naiad</title></head>
<body>
<p>This page shows the OpenAPI document of the server with Swagger UI, which is not installed:</p>
<pre>pip install "naiad-server[docs]"</pre>
<p>The document itself is at <a href="/v2/openapi.json">/v2/openapi.json</a>.</p>
</body>
</html>
"""

#: The page gets files of this server alone, cannot be framed, and sends no forms. Swagger UI sets styles of elements,
#: and has pictures in its style sheet.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)

_HEADERS = {**SERVER_HEADER, "Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}


async def page(call: HttpCall) -> web.Response:
    """Return the page, or with status 501 how to install what it needs."""
    is_there = await asyncio.to_thread(_file, "swagger-ui-bundle.js") is not None
    return web.Response(
        status=200 if is_there else 501,
        body=_PAGE if is_there else _NO_PACKAGE,
        content_type="text/html",
        charset="utf-8",
        headers=_HEADERS,
    )


async def file(call: HttpCall) -> web.Response:
    """Return a file of the page. Without the package there is none."""
    name = call.names["file"]
    content = _SCRIPT_TEXT if name == SCRIPT else await asyncio.to_thread(_file, name)
    if content is None:
        return web.Response(status=404, headers=_HEADERS)
    kind = FILES.get(name, "text/javascript")
    return web.Response(body=content, content_type=kind, headers={**_HEADERS, "Cache-Control": "max-age=3600"})


@functools.cache
def _file(name: str) -> bytes | None:
    """Return a file of Swagger UI; None if the package is not installed, or lacks the file. Blocks."""
    try:
        found = importlib.util.find_spec(_PACKAGE)
        if found is None or not found.submodule_search_locations:
            return None
        return (Path(found.submodule_search_locations[0]) / "dist" / name).read_bytes()
    except (OSError, ImportError, ValueError):
        return None
