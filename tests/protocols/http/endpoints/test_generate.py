from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model

    Announce = Callable[[Model], asyncio.Event]
    Exchange = Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]


async def post(
    session: aiohttp.ClientSession, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, str, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(f"/v2/models/{path}", data=data, headers=headers) as response:
        return response.status, response.headers["Content-Type"], await response.read()


def test_the_only_response_is_one_flat_object(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        assert await post(session, "echo/generate", {"IN": [1, 2], "id": "7", "temperature": 0.5}) == (
            200,
            "application/json",
            b'{"OUT_IN":[1.0,2.0],"id":"7","model_name":"echo","model_version":"1","temperature":0.5}',
        )
        _, _, body = await post(session, "repeat/generate", {"IN": 5})
        assert body == b'{"OUT_IN":5,"model_name":"repeat","model_version":"1"}'

    exchange(test)


@pytest.mark.parametrize("values", [[], [1, 2], list(range(50))])
def test_any_other_number_of_responses_is_an_error(exchange: Exchange, values: list[int]) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        status, _, body = await post(session, "repeat/generate", {"IN": values})
        assert status == 200
        assert json.loads(body)["error"].startswith("generate expects model to produce exactly 1 response")

    exchange(test)


def test_a_stream_has_one_event_for_each_response(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        assert await post(session, "repeat/generate_stream", {"IN": [5, 6]}) == (
            200,
            "text/event-stream; charset=utf-8",
            b'data: {"OUT_IN":5,"model_name":"repeat","model_version":"1"}\n\n'
            b'data: {"OUT_IN":6,"model_name":"repeat","model_version":"1"}\n\n',
        )
        assert (await post(session, "repeat/generate_stream", {"IN": []}))[2] == b""

    exchange(test)


def test_the_status_is_that_of_the_first_response(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        body = {"IN": "unavailable"}
        error = b'{"error":"asked for unavailable"}'
        assert await post(session, "fail/generate", body) == (503, "application/json", error)
        status, _, events = await post(session, "fail/generate_stream", body)
        assert (status, events) == (503, b"data: " + error + b"\n\n")

    exchange(test)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "text"),
    [
        ("nothing", {}, {}, 404, "Request for unknown model: 'nothing' is not found"),
        ("echo", b"", {}, 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ("echo", [], {}, 500, "attempt to get members for non-object"),
        (
            "echo",
            {"IN": [1]},
            {"Content-Encoding": "gzip"},
            400,
            "Unsupported content-encoding, only 'identity' is supported.",
        ),
        ("echo", {"IN": ["x"]}, {}, 500, "Unable to parse 'data': attempt to access JSON non-number as double"),
    ],
)
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_refused_requests_have_no_stream(
    exchange: Exchange, endpoint: str, path: str, body: Any, headers: dict[str, str], status: int, text: str
) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        found, content_type, received = await post(session, f"{path}/{endpoint}", body, headers)
        assert (found, content_type, json.loads(received)) == (status, "application/json", {"error": text})

    exchange(test)


def test_a_client_that_goes_away_cancels_its_stream(exchange: Exchange, announce_submit: Announce) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        model = kernel.resolve("stuck")
        accepted = announce_submit(model)
        call = asyncio.ensure_future(session.post("/v2/models/stuck/generate_stream", json={"IN": 1}))
        await accepted.wait()
        call.cancel()
        await asyncio.wait([call])
        await model.drain()
        assert model.statistics.failures["CANCELED"] == 1

    exchange(test)
