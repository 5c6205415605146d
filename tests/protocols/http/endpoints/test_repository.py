from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from kernel.serving.kernel import Kernel

    Exchange = Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]


def test_the_index_leaves_out_what_is_not_known(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        kernel.catalog.set_known({"never", "unloaded"})
        for path, body in (("/v2/repository/index", b""), ("/v2/repository/any/index", b"{}")):
            async with session.post(path, data=body) as response:
                items = {item["name"]: item for item in await response.json()}
            assert items["echo"] == {"name": "echo", "version": "1", "state": "READY"}
            assert items["unloaded"] == {
                "name": "unloaded",
                "version": "1",
                "state": "UNAVAILABLE",
                "reason": "unloaded",
            }
            assert items["never"] == {"name": "never"}
        async with session.post("/v2/repository/index", data=b'{"ready":true}') as response:
            assert {item["state"] for item in await response.json()} == {"READY"}

    exchange(test)


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        ("models/m/load", b"", ("load", "m", None)),
        ("models/m/load", b'{"parameters":{}}', ("load", "m", None)),
        (
            "models/m/load",
            b'{"parameters":{"config":"{}","file:1/model.py":"YWJj"}}',
            ("load", "m", {"config": "{}", "file:1/model.py": b"abc"}),
        ),
        ("models/m/unload", b"", ("unload", "m", False)),
        ("models/m/unload", b'{"parameters":{"unload_dependents":true,"other":1}}', ("unload", "m", True)),
    ],
)
def test_models_are_loaded_and_unloaded(exchange: Exchange, path: str, body: bytes, call: Any) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.post(f"/v2/repository/{path}", data=body) as response:
            assert (response.status, await response.read()) == (200, b"")
            assert response.headers["Content-Type"] == "application/json"
        repository: Any = kernel.repository
        assert repository.calls == [call]

    exchange(test)


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("index", b"x", 500, "failed to parse the request JSON buffer: Invalid value. at 0"),
        ("index", b'{"ready":1}', 400, "Invalid value for 'ready': expected a boolean"),
        (
            "index",
            b'{"ready":' + b"[" * 5000 + b"]" * 5000 + b"}",
            400,
            "Invalid value for 'ready': expected a boolean",
        ),
        ("r/models/m/load", b"", 501, "'repository_name' specification is not supported"),
        ("r/models/m/unload", b"", 501, "'repository_name' specification is not supported"),
        ("models/missing/load", b"", 404, "no such model"),
        ("models/m/load", b'{"parameters":5}', 500, "attempt to get members for non-object"),
        ("models/m/load", b'{"parameters":{"x":"y"}}', 500, "unexpected error on creating Triton parameter"),
        ("models/m/load", b'{"parameters":{"x":5}}', 500, "attempt to access JSON non-string as string"),
        ("models/m/load", b'{"parameters":{"config":5}}', 500, "attempt to access JSON non-string as string"),
        ("models/m/load", b'{"parameters":{"file:f":5}}', 500, "attempt to access JSON non-string as string"),
        (
            "models/m/unload",
            b'{"parameters":{"unload_dependents":5}}',
            500,
            "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean",
        ),
    ],
)
def test_bad_bodies_are_refused_with_tritons_text(
    exchange: Exchange, path: str, body: bytes, status: int, text: str
) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.post(f"/v2/repository/{path}", data=body) as response:
            assert (response.status, json.loads(await response.read())) == (status, {"error": text})

    exchange(test)


def test_a_file_that_is_not_base64_is_refused(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.post("/v2/repository/models/m/load", data=b'{"parameters":{"file:f":"YWJjZ"}}') as response:
            assert response.status == 400
            assert "load parameter 'file:f' is not base64" in await response.text()

    exchange(test)
