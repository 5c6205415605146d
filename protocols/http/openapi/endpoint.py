"""GET /v2/openapi.json: keeps the last document, and makes a new one when models have changed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.serving.front_doors.interface import KernelInterface
    from protocols.access.restricted import Restrictions

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
