"""GET /docs and /v2/openapi.json: the OpenAPI document of the server, and Swagger UI, which shows it as a page.

The files of Swagger UI come with the server, in `protocols/http/swagger`. The page loads nothing from other hosts.
`OpenApi` keeps the last document, and makes a new one when models have changed.
"""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from protocols.http import web
from protocols.http.inference.compression import GZIP, choose_encoding
from protocols.http.responses import SERVER_HEADER, packaged_file

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.serving.interface import KernelInterface
    from protocols.access import Restrictions
    from protocols.http.call import HttpCall

PAGE_PATH = "/docs"

DOCS_FOLDER = Path(__file__).parent.parent / "swagger"

#: Files of Swagger UI that the page needs, with their types. Texts are stored in gzip, as browsers get them.
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

#: The page gets files of this server alone, cannot be framed, and sends no forms. Swagger UI sets styles of elements,
#: and has pictures in its style sheet.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)

_HEADERS = {**SERVER_HEADER, "Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}


async def page(call: HttpCall) -> web.Response:
    """Return the page."""
    return web.Response(body=_PAGE, content_type="text/html", charset="utf-8", headers=_HEADERS)


async def file(call: HttpCall) -> web.Response:
    """Return a file of the page."""
    name = call.names["file"]
    headers = {**_HEADERS, "Cache-Control": "max-age=3600"}
    if name == SCRIPT:
        return web.Response(body=_SCRIPT_TEXT, content_type="text/javascript", headers=headers)
    kind = FILES[name]
    if not kind.startswith("text/"):
        return web.Response(
            body=await asyncio.to_thread(packaged_file, DOCS_FOLDER / name), content_type=kind, headers=headers
        )
    headers["Vary"] = "Accept-Encoding"
    if choose_encoding(call.http.headers.get("Accept-Encoding", "")) == GZIP:
        headers["Content-Encoding"] = GZIP
        body = await asyncio.to_thread(packaged_file, DOCS_FOLDER / f"{name}.gz")
    else:
        body = await asyncio.to_thread(inflated, f"{name}.gz")
    return web.Response(body=body, content_type=kind, headers=headers)


def inflated(name: str) -> bytes:
    """Return the content of a gzip file of `DOCS_FOLDER`. Takes 10 ms for the largest."""
    return zlib.decompress(packaged_file(DOCS_FOLDER / name), wbits=31)


_encoder = msgspec.json.Encoder()


class OpenApi:
    """The document of one server."""

    def __init__(self, kernel: KernelInterface, restrictions: Restrictions, url: str) -> None:
        """`url` is where programs on this machine reach the server."""
        self._kernel = kernel
        self._url = url
        self._restrictions = restrictions
        self._made = asyncio.Lock()
        #: The generation of the catalog that the document was made for.
        self._generation = -1
        self._text = b""

    async def text(self) -> bytes:
        """Return the document with the newest ready version of each model, in JSON."""
        async with self._made:
            catalog = self._kernel.catalog
            if self._generation != catalog.generation:
                generation = catalog.generation
                newest = {model.name: model.spec for model in self._kernel.figures()}
                # A thousand models take half a second, in which the event loop serves other requests.
                self._text = await asyncio.to_thread(self._make, list(newest.values()))
                self._generation = generation
            return self._text

    def _make(self, specs: list[ModelSpec]) -> bytes:
        # Imported late, and in a thread: most servers are never asked for it.
        from protocols.http.openapi.document import openapi_document

        return _encoder.encode(openapi_document(self._kernel.identity.version, specs, self._restrictions, self._url))
