"""A connection whose next message another process serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from protocols.http.fast.connection import FastConnection
    from protocols.http.fast.request_heads import KnownRequestHead
    from tests.protocols.http.fast.conftest import RecordingTransport

    WithFastPath = Callable[[Callable[[Any], Awaitable[None]]], None]

REQUEST = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
BODY = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[%d]}]}'


class Moves:
    """Wants every inference request, unless its connection stays."""

    remembers = False

    def __init__(self, *, serves_all: bool, possible: bool) -> None:
        self.serves_all = serves_all
        self.possible = possible
        self.moved: list[bytes] = []

    def wanted(self, connection: FastConnection, known: KnownRequestHead | None) -> bool:
        return not connection.stays

    def move(self, connection: FastConnection, transport: RecordingTransport, received: bytes) -> bool:
        if self.possible:
            self.moved.append(received)
            transport.abort()
        return self.possible


def request(number: int) -> bytes:
    body = BODY % number
    return REQUEST % (len(body), body)


def test_a_connection_moves_with_all_that_has_come(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.fast_path.moves = moves = Moves(serves_all=True, possible=True)
        received = request(1) + request(2)[:20]
        lab.connection.data_received(received)
        assert moves.moved == [received]
        assert lab.transport.written == b""
        assert lab.transport.aborted
        assert lab.connection not in lab.fast_path.connections

    with_fast_path(test)


def test_what_cannot_move_is_served_by_a_process_that_serves_everything(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.fast_path.moves = Moves(serves_all=True, possible=False)
        lab.connection.data_received(request(1) + request(2))
        assert lab.transport.written.count(b"HTTP/1.1 200 OK") == 2
        assert not lab.transport.aborted

    with_fast_path(test)


def test_what_cannot_move_ends_where_this_process_cannot_serve_it(with_fast_path: WithFastPath) -> None:
    async def test(lab: Any) -> None:
        lab.fast_path.moves = Moves(serves_all=False, possible=False)
        lab.connection.data_received(request(1))
        assert lab.transport.written == b""
        assert lab.transport.aborted

    with_fast_path(test)
