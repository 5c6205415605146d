"""The page of the OpenAPI document: its files are the server's own, and come with it."""

from __future__ import annotations

import gzip
import hashlib
import re
from typing import TYPE_CHECKING

import pytest

from kernel.options import HttpOptions
from protocols.http.endpoints import docs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from kernel.serving.kernel import Kernel

    Exchange = Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]
    Serve = Callable[[HttpOptions, Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]


def test_the_page_and_all_that_it_loads_come_from_this_server(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/docs") as response:
            assert (response.status, response.content_type) == (200, "text/html")
            assert "script-src 'self'" in response.headers["Content-Security-Policy"]
            text = await response.text()
        loaded = re.findall(r'(?:src|href)="([^"]+)"', text)
        assert len(loaded) == len(docs.FILES) + 1
        for path in loaded:
            async with session.get(path) as response:
                assert response.status == 200, path
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert await response.read() != b""
        async with session.get("/docs/naiad.js") as response:
            assert response.content_type == "text/javascript"
            assert '"/v2/openapi.json"' in await response.text()

    exchange(test)


def test_a_client_that_does_not_take_gzip_gets_the_same_file_plain(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        path = "/docs/swagger-ui-bundle.js"
        async with session.get(path, headers={"Accept-Encoding": "gzip, deflate, br"}) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            assert response.headers["Vary"] == "Accept-Encoding"
            inflated = gzip.decompress(await response.read())
        async with session.get(path, headers={"Accept-Encoding": "identity"}) as response:
            assert "Content-Encoding" not in response.headers
            assert await response.read() == inflated
        assert b"SwaggerUIBundle" in inflated

    exchange(test)


def test_the_files_are_those_that_their_version_names() -> None:
    text = (docs.DOCS_FOLDER / "VERSION.md").read_text()
    stored = sorted(path.name for path in docs.DOCS_FOLDER.glob("*.gz"))
    assert stored == ["swagger-ui-bundle.js.gz", "swagger-ui.css.gz"]
    for name in stored:
        assert hashlib.sha256(docs.inflated(name)).hexdigest() in text, name


@pytest.mark.parametrize("path", ["/docs/", "/docs/../routes.py", "/docs/%2e%2e/__init__.py", "/docs/index.css"])
def test_no_other_file_can_be_read(exchange: Exchange, path: str) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get(path) as response:
            assert response.status == 404

    exchange(test)


def test_a_server_with_restricted_metadata_has_no_open_page(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/docs") as response:
            assert response.status == 403

    serve(HttpOptions(restricted_api=("metadata:X-Key=a",)), test)


def test_the_document_says_where_the_server_is(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/v2/openapi.json") as response:
            servers = [each["url"] for each in (await response.json())["servers"]]
            assert servers == ["/", f"http://localhost:{response.url.port}"]

    exchange(test)
