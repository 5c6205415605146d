from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    WithLane = Callable[[Callable[[Any], Awaitable[None]]], None]


def test_the_clock_goes_while_there_are_connections(with_lane: WithLane) -> None:
    async def test(lab: Any) -> None:
        lane = lab.lane
        before = lane.now
        assert before > 0
        lane._tick()
        assert lane.now >= before
        assert lane._timer is not None
        lane.remove(lab.connection)
        lane._tick()
        assert lane._timer is None
        lane.add(lab.connection)
        assert lane._timer is not None

    with_lane(test)


def test_closing_waits_for_requests_that_run(with_lane: WithLane) -> None:
    async def test(lab: Any) -> None:
        lab.connection.data_received(
            b"POST /v2/models/stuck/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 67\r\n\r\n"
            b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}]}'[:-2]
        )
        closing = asyncio.ensure_future(lab.lane.close(10))
        await asyncio.sleep(0)
        assert not lab.transport.closed
        lab.connection.data_received(b"]}")
        (request,) = lab.waiting
        request.fail(InvalidArgument("enough"))
        assert lab.transport.written.endswith(b'enough"}')
        assert lab.transport.closed
        lab.connection.connection_lost(None)
        await closing

    with_lane(test)


def test_a_connection_that_comes_while_the_lane_closes_is_closed(with_lane: WithLane) -> None:
    async def test(lab: Any) -> None:
        lab.lane.remove(lab.connection)
        await lab.lane.close(10)
        lab.lane.add(lab.connection)
        assert lab.transport.closed

    with_lane(test)
