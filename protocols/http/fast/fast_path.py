"""The lane as a whole: its connections, their clock, and an orderly stop."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

import msgspec

from protocols.http.aiohttp_internals import KEEPALIVE_S
from protocols.http.body import INACTIVITY_S, MINIMUM_BYTES_PER_S
from protocols.http.fast.connection import FastConnection
from protocols.http.fast.known_heads import Heads
from protocols.http.fast.prepared import PreparedBodies

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.kernel import Kernel
    from protocols.http.aiohttp_internals import AiohttpServer


class Times(msgspec.Struct, frozen=True):
    """How long clients may keep a connection waiting, in seconds."""

    #: Without any request, within a head, and within a body.
    idle_s: float = KEEPALIVE_S
    head_s: float = 10.0
    body_s: float = INACTIVITY_S
    #: After `body_s` a body must have come at this rate on average.
    bytes_per_s: int = MINIMUM_BYTES_PER_S
    #: Without reading anything of an answer.
    send_s: float = 60.0


#: How often connections are looked at, which is also how exact their times are.
_TICK_S = 1.0


class FastPath:
    """Answers inference requests in front of aiohttp. A `protocols.http.listener.FirstServer`."""

    aiohttp_server: AiohttpServer

    def __init__(self, kernel: Kernel, max_input_size: int, times: Times | None = None) -> None:
        """`max_input_size` is in bytes, see `protocols.http.call.HttpCall`."""
        self.kernel = kernel
        self.max_input_size = max_input_size
        self.heads = Heads(kernel, max_input_size)
        self.forms = PreparedBodies()
        self.times = times or Times()
        #: Seconds of the event loop's clock at the last tick.
        self.now = 0.0
        self._connections: set[FastConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._all_closed: asyncio.Event | None = None

    def open(self, aiohttp_server: AiohttpServer) -> Callable[[], FastConnection]:
        self.aiohttp_server = aiohttp_server
        return functools.partial(FastConnection, self)

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def close(self, grace_s: float) -> None:
        """Close idle connections, and others when their requests are answered or `grace_s` seconds are over."""
        self._all_closed = asyncio.Event()
        for connection in list(self._connections):
            connection.close_when_idle()
        if self._connections:
            try:
                async with asyncio.timeout(grace_s):
                    await self._all_closed.wait()
            except TimeoutError:
                for connection in list(self._connections):
                    connection.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def add(self, connection: FastConnection) -> None:
        """Watch over a new connection, on a clock that goes while there is one."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self.now = loop.time()
            self._timer = loop.call_later(_TICK_S, self._tick)
        self._connections.add(connection)
        if self._all_closed is not None:
            connection.close_when_idle()

    def remove(self, connection: FastConnection) -> None:
        self._connections.discard(connection)
        if self._all_closed is not None and not self._connections:
            self._all_closed.set()

    def expire(self, now: float) -> None:
        """Let all connections look at the time `now`."""
        self.now = now
        for connection in list(self._connections):
            connection.expire()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self.expire(loop.time())
        self._timer = loop.call_later(_TICK_S, self._tick) if self._connections else None
