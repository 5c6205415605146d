from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.records.recording_format import SegmentReader
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
        kernel.traffic = Traffic(kernel.rules, FakeClock(), kernel.budget)
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


def test_rewards_are_counted_for_the_version_that_had_the_request(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        kernel.traffic = Traffic(kernel.rules, FakeClock(), kernel.budget)
        path = "/v2/models/echo/feedback"
        async with session.post(path, json={"id": "a", "reward": 1}) as response:
            assert response.status == 400
            assert "has no 'feedback'" in (await response.json())["error"]
        async with session.post(PATH, json={"weights": {"1": 1}, "feedback": {"ids": 10}}) as response:
            assert response.status == 200
        metadata = await (await session.get("/v2/models/echo")).json()
        inputs = [
            {
                "name": each["name"],
                "datatype": each["datatype"],
                "shape": [abs(dim) for dim in each["shape"]],
                "data": [1],
            }
            for each in metadata["inputs"]
        ]
        async with session.post("/v2/models/echo/infer", json={"id": "a", "inputs": inputs}) as response:
            assert response.status == 200, await response.text()
        for body, found in (
            ([{"id": "a", "reward": 0.5}, {"id": "b", "reward": 1}], {"counted": 1, "unknown": 1}),
            ({"id": "a", "reward": 0.5}, {"counted": 0, "unknown": 1}),
        ):
            async with session.post(path, json=body) as response:
                assert await response.json() == found
        async with session.post(path, data="[") as response:
            assert response.status == 400
        async with session.get(PATH) as response:
            [row] = (await response.json())["feedback"]["versions"]
        assert (row["model"], row["version"], row["rewards"], row["mean"]) == ("echo", 1, 1, 0.5)

    exchange(test)


def test_the_worst_pairs_of_a_model_without_a_shadow_are_an_empty_recording(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        kernel.traffic = Traffic(kernel.rules, FakeClock(), kernel.budget)
        async with session.get(f"{PATH}/shadow/worst") as response:
            content = await response.read()
        assert (response.status, response.content_type) == (200, "application/octet-stream")
        assert list(SegmentReader(memoryview(content), "it").contents()) == []
        async with session.get("/v2/models/nothing/traffic/shadow/worst") as response:
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
        kernel.traffic = Traffic(kernel.rules, FakeClock(), kernel.budget)
        async with session.post(PATH, data=body) as response:
            assert response.status == status
            assert text in (await response.json(content_type=None))["error"]

    exchange(test)


def test_an_unknown_model_and_a_server_without_rules(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get(PATH) as response:
            assert response.status == 501
        kernel.traffic = Traffic(kernel.rules, FakeClock(), kernel.budget)
        async with session.get("/v2/models/nothing/traffic") as response:
            assert response.status == 404
        async with session.get("/v2/models/echo/versions/1/traffic") as response:
            assert response.status == 404, "a rule belongs to a model, not to a version"

    exchange(test)
