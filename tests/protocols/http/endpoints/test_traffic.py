from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.testing import FakeClock
from kernel.traffic.control import Traffic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from kernel.serving.kernel import Kernel

    Exchange = Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]

PATH = "/v2/models/echo/traffic"


def test_a_rule_is_set_and_shown_and_reset(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        kernel.traffic = Traffic(kernel.rules, FakeClock())
        async with session.get(PATH) as response:
            assert (await response.json())["source"] == "none"
        async with session.post(PATH, json={"labels": {"stable": 1}, "weights": {"stable": 1}}) as response:
            found = await response.json()
        assert (response.status, found["source"], found["rule"]["weights"]) == (200, "client", {"stable": 1})
        assert found["history"][0]["by"].startswith("HTTP 127.0.0.1")
        async with session.get("/v2/models/echo/versions/stable/stats") as response:
            assert [each["version"] for each in (await response.json())["model_stats"]] == ["1"]
        async with session.get("/v2/models/echo/versions/other/stats") as response:
            assert response.status == 404
        async with session.post(f"{PATH}/reset") as response:
            assert (await response.json())["source"] == "none"
        async with session.get("/v2/models/echo/versions/stable/stats") as response:
            assert response.status == 404

    exchange(test)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ("[]", 400, "the traffic rule must be a JSON object"),
        ("{}", 400, "expected one or more of labels"),
        ('{"weights": {"x": 1}}', 400, "'x' in 'weights' names no target"),
        ('{"wieghts": {}}', 400, "unknown field `wieghts`"),
        ("{", 400, "failed to parse the request JSON buffer"),
    ],
)
def test_a_wrong_rule_is_refused(exchange: Exchange, body: str, status: int, text: str) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        kernel.traffic = Traffic(kernel.rules, FakeClock())
        async with session.post(PATH, data=body) as response:
            assert response.status == status
            assert text in (await response.json(content_type=None))["error"]

    exchange(test)


def test_an_unknown_model_and_a_server_without_rules(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get(PATH) as response:
            assert response.status == 501
        kernel.traffic = Traffic(kernel.rules, FakeClock())
        async with session.get("/v2/models/nothing/traffic") as response:
            assert response.status == 404
        async with session.get("/v2/models/echo/versions/1/traffic") as response:
            assert response.status == 404, "a rule belongs to a model, not to a version"

    exchange(test)
