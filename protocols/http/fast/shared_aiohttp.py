"""aiohttp on the transport of a fast-path connection: it serves single messages that the fast path gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from protocols.http.aiohttp_internals import AiohttpConnection, AiohttpServer


class SharedAiohttp:
    """The aiohttp connection of one transport, made when the first message is for it."""

    def __init__(self, transport: asyncio.Transport, on_response: Callable[[bool], None]) -> None:
        """`on_response` is called after each response, with whether the connection stays open."""
        self._transport = transport
        self._on_response = on_response
        self._connection: AiohttpConnection | None = None
        #: Whether a message was begun that has no response yet.
        self.busy = False

    def begin(self, server: AiohttpServer, head: bytes) -> None:
        """Begin a message with its head."""
        if self._connection is None:
            self._connection = server.shared_connection(self._responded)
            self._connection.connection_made(self._transport)
        self.busy = True
        self._connection.data_received(head)

    def feed(self, part: bytes) -> None:
        """Give the next bytes of the message, whose response may have been sent already."""
        assert self._connection is not None, "no message was begun"
        self._connection.data_received(part)

    def pause_writing(self) -> None:
        """Nothing more can be written for now. May be called again."""
        if self._connection is not None and not self._connection.writing_paused:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Something can be written. May be called again: responses of the fast path wait, too."""
        if self._connection is not None and self._connection.writing_paused:
            self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._connection.connection_lost(exc)

    def leave_transport(self) -> None:
        """Serve no more messages; the transport stays open."""
        if self._connection is not None:
            self._connection.leave_transport()

    def _responded(self, stays_open: bool) -> None:
        self.busy = False
        self._on_response(stays_open)
