from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kernel.observe.statistics import BatchStatistics, Duration

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from kernel.serving.kernel import Kernel

    Exchange = Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v2/health/live", 200, None),
        ("/v2/models/echo/ready", 200, None),
        ("/v2/models/echo/versions/1/ready", 200, None),
        ("/v2/models/nothing/ready", 400, "Model version not ready"),
        ("/v2/models/echo/versions/7/ready", 400, "Model version not ready"),
        ("/v2/models/unloaded/ready", 400, "Model version not ready"),
        (
            "/v2/models/echo/versions/99999999999999999999/ready",
            400,
            "failed to get model version from specified version string '99999999999999999999' (details: stol), "
            "version should be an integral value > 0",
        ),
    ],
)
def test_health(exchange: Exchange, path: str, status: int, text: str | None) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get(path) as response:
            assert (response.status, response.headers["Content-Type"]) == (status, "text/plain")
            assert await response.read() == (
                b"" if text is None else json.dumps({"error": text}, separators=(",", ":")).encode()
            )

    exchange(test)


def test_a_server_that_stops_says_so(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        kernel.stopping = True
        for path in ("/v2/health/live", "/v2/health/ready"):
            async with session.get(path) as response:
                assert (response.status, await response.json(content_type=None)) == (503, {"error": "Server exiting"})

    exchange(test)


def test_metadata_of_the_server(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/v2") as response:
            found = await response.json()
        assert list(found) == ["name", "version", "extensions"]
        assert found["extensions"] == list(kernel.identity.extensions)

    exchange(test)


def test_metadata_of_a_model(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        for path in ("/v2/models/batched", "/v2/models/batched/versions/1"):
            async with session.get(path) as response:
                assert await response.read() == (
                    b'{"name":"batched","versions":["1"],"platform":"fake",'
                    b'"inputs":[{"name":"IN","datatype":"FP32","shape":[-1,-1]}],'
                    b'"outputs":[{"name":"OUT_IN","datatype":"FP32","shape":[-1,-1]}]}'
                )
        async with session.get("/v2/models/nothing") as response:
            assert (response.status, response.content_type) == (404, "application/json")
            assert await response.json() == {"error": "Request for unknown model: 'nothing' is not found"}

    exchange(test)


def test_the_configuration_of_a_model(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/v2/models/batched/config") as response:
            found = await response.json()
        assert (found["name"], found["max_batch_size"], found["input"][0]["dims"]) == ("batched", 8, [-1])

    exchange(test)


def test_statistics_are_written_as_triton_writes_them(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        counted = kernel.resolve("echo").statistics
        counted.success = Duration(1, 7)
        counted.batches[2] = BatchStatistics(1, 3, 4, 5)
        async with session.get("/v2/models/echo/versions/1/stats") as response:
            assert await response.read() == (
                b'{"model_stats":[{"name":"echo","version":"1","last_inference":0,"inference_count":0,'
                b'"execution_count":0,"inference_stats":{"success":{"count":1,"ns":7},"fail":{"count":0,"ns":0},'
                b'"queue":{"count":1,"ns":0},"compute_input":{"count":1,"ns":0},"compute_infer":{"count":1,"ns":0},'
                b'"compute_output":{"count":1,"ns":0},"cache_hit":{"count":0,"ns":0},"cache_miss":{"count":0,"ns":0}},'
                b'"response_stats":{},"batch_stats":[{"batch_size":2,"compute_input":{"count":1,"ns":3},'
                b'"compute_infer":{"count":1,"ns":4},"compute_output":{"count":1,"ns":5}}],"memory_usage":[]}]}'
            )
        async with session.get("/v2/models/stats") as response:
            names = [model["name"] for model in (await response.json())["model_stats"]]
        assert names == [model.name for model in kernel.catalog.ready_models()]

    exchange(test)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nothing/stats", "requested model 'nothing' is not available"),
        ("unloaded/stats", "requested model 'unloaded' is not available"),
        ("echo/versions/2/stats", "requested model version is not available for model 'echo'"),
    ],
)
def test_statistics_of_what_is_not_ready_are_refused(exchange: Exchange, path: str, text: str) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get(f"/v2/models/{path}") as response:
            assert (response.status, await response.json()) == (400, {"error": text})

    exchange(test)
