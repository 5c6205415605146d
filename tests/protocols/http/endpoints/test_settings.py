from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from kernel.serving.kernel import Kernel

    Exchange = Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]

TRACE = "/v2/trace/setting"
MODEL_TRACE = "/v2/models/echo/trace/setting"


async def get(session: aiohttp.ClientSession, path: str) -> bytes:
    async with session.get(path) as response:
        return await response.read()


async def post(session: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int, bytes]:
    async with session.post(path, data=body) as response:
        return response.status, await response.read()


def shown(rate: int) -> bytes:
    return (
        b'{"trace_level":["OFF"],"trace_rate":"%d","trace_count":"-1","log_frequency":"0","trace_file":"",'
        b'"trace_mode":"triton"}' % rate
    )


def test_trace_settings_are_inherited_until_a_model_has_its_own(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        assert await get(session, TRACE) == shown(1000)
        assert await post(session, TRACE, b'{"trace_rate":"5","unknown":[]}') == (200, shown(5))
        assert await get(session, MODEL_TRACE) == shown(5)
        assert await post(session, MODEL_TRACE, b'{"trace_rate":"6","trace_level":["OFF"]}') == (200, shown(6))
        assert await get(session, TRACE) == shown(5)
        assert await post(session, MODEL_TRACE, b'{"trace_rate":null,"trace_level":null}') == (200, shown(5))
        assert await post(session, TRACE, b'{"trace_rate":null}') == (200, shown(1000))
        assert await post(session, TRACE, b"[]") == (200, shown(1000))

    exchange(test)


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (TRACE, b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (TRACE, b'{"trace_rate":5}', 500, "attempt to access JSON non-string as string"),
        (TRACE, b'{"trace_rate":"many"}', 400, "Unable to parse 'trace_rate', got: many"),
        (TRACE, b'{"trace_level":"OFF"}', 500, "attempt to access JSON non-array as array"),
        (TRACE, b'{"trace_level":[5]}', 500, "attempt to access JSON non-string as string"),
        (TRACE, b'{"trace_level":["OFF","TENSORS"]}', 400, "Expect only one trace level 'OFF' is specified"),
        (TRACE, b'{"trace_file":null}', 501, "trace file location can not be updated through network protocol"),
        ("/v2/models/nothing/trace/setting", b"{}", 400, "Request for unknown model : nothing"),
        ("/v2/logging", b'{"log_info":"x"}', 500, "attempt to access JSON non-boolean as boolean"),
        (
            "/v2/logging",
            b'{"log_verbose_level":-1}',
            500,
            "attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ("/v2/logging", b'{"log_format":5}', 500, "attempt to access JSON non-string as string"),
        ("/v2/logging", b'{"log_file":"f"}', 501, "log file location can not be updated through network protocol"),
    ],
)
def test_bad_settings_are_refused_with_tritons_text(
    exchange: Exchange, path: str, body: bytes, status: int, text: str
) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        before = await get(session, TRACE), await get(session, "/v2/logging")
        found, received = await post(session, path, body)
        assert (found, json.loads(received)) == (status, {"error": text})
        assert (await get(session, TRACE), await get(session, "/v2/logging")) == before

    exchange(test)


def test_log_settings_are_changed_and_null_leaves_them(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        change = b'{"log_info":false,"log_verbose_level":2,"log_format":"ISO8601","log_error":null,"log_file":null}'
        assert await post(session, "/v2/logging", change) == (
            200,
            b'{"log_file":"","log_info":false,"log_warning":true,"log_error":true,"log_verbose_level":2,'
            b'"log_format":"ISO8601"}',
        )
        assert kernel.log.values.log_verbose_level == 2

    exchange(test)
