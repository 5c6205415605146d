from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kernel.serving.catalog import ModelState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from kernel.serving.kernel import Kernel

    Exchange = Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]


async def get(session: aiohttp.ClientSession, path: str) -> tuple[int, str, bytes]:
    async with session.get(path) as response:
        return response.status, response.headers["Content-Type"], await response.read()


def test_a_server_that_runs_is_live(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        assert await get(session, "/v2/health/live") == (200, "text/plain", b"")

    exchange(test)


def test_a_server_with_a_model_that_failed_to_load_is_not_ready(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        assert (await get(session, "/v2/health/ready"))[0] == 200
        kernel.catalog.set_state("new", 1, ModelState.UNAVAILABLE, "it does not load")
        assert await get(session, "/v2/health/ready") == (400, "text/plain", b"")

    exchange(test)


def test_a_server_that_stops_is_neither_live_nor_ready(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        kernel.stopping = True
        for path in ("/v2/health/live", "/v2/health/ready"):
            status, content_type, body = await get(session, path)
            assert (status, content_type, json.loads(body)) == (503, "text/plain", {"error": "Server exiting"})
        kernel.stopping = False

    exchange(test)


@pytest.mark.parametrize(
    ("path", "ready"),
    [
        ("echo", True),
        ("echo/versions/1", True),
        ("echo/versions/2", False),
        ("nothing", False),
        ("unloaded", False),
        ("unloaded/versions/1", False),
    ],
)
def test_a_model_is_ready_or_an_error_says_that_it_is_not(exchange: Exchange, path: str, ready: bool) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        status, content_type, body = await get(session, f"/v2/models/{path}/ready")
        assert (status, content_type) == (200 if ready else 400, "text/plain")
        assert body == (b"" if ready else b'{"error":"Model version not ready"}')

    exchange(test)
