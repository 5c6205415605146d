from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    WithFastPath = Callable[[Callable[[Any], Awaitable[None]]], None]


def test_the_clock_goes_while_there_are_connections(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        fast_path = lab.fast_path
        assert fast_path.now_s > 0
        fast_path.now_s = 0.0
        fast_path.tick()
        assert fast_path.now_s > 0
        assert fast_path.timer is not None
        fast_path.remove(lab.connection)
        fast_path.tick()
        assert fast_path.timer is None
        fast_path.add(lab.connection)
        assert fast_path.timer is not None

    with_fast_path(test)


def test_closing_waits_for_requests_that_run(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(
            b"POST /v2/models/stuck/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 67\r\n\r\n"
            b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}]}'[:-2]
        )
        closing = asyncio.ensure_future(lab.fast_path.close(10))
        await asyncio.sleep(0)
        assert not lab.transport.closed
        lab.connection.data_received(b"]}")
        (request,) = lab.waiting
        request.fail(InvalidArgument("enough"))
        assert lab.transport.written.endswith(b'enough"}')
        assert lab.transport.closed
        lab.connection.connection_lost(None)
        await closing

    with_fast_path(test)


def test_a_connection_that_comes_while_the_fast_path_closes_is_closed(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.fast_path.remove(lab.connection)
        await lab.fast_path.close(10)
        lab.fast_path.add(lab.connection)
        assert lab.transport.closed

    with_fast_path(test)
