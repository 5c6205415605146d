"""The fast path as a whole: its connections, their clock, and an orderly stop."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Protocol

from kernel.loop.clock import in_next_iteration
from protocols.http.client_limits import TIMEOUTS, abort_gone
from protocols.http.fast.connection import MESSAGES_AT_ONCE, FastConnection
from protocols.http.fast.request_heads import KnownRequestHeads
from protocols.http.request_rules import RequestRules
from protocols.loop_budgets import IterationBudget, MessageBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocols.http.aiohttp_internals import AiohttpServer
    from protocols.http.client_limits import ClientTimeouts
    from protocols.http.fast.request_heads import KnownRequestHead
    from protocols.http.inference.infer_call import HttpInference

#: How often connections are checked, which is also how exact their timeouts are.
_TICK_S = 1.0

_NO_RULES = RequestRules()


class ConnectionMoves(Protocol):
    """Lets connections move between the kernel's process and front doors in processes of their own."""

    #: Whether a message with the same head as the one before goes the same way, without another question.
    remembers: bool
    #: Whether this process serves every message, also where the connection cannot move.
    serves_all: bool

    def wanted(self, connection: FastConnection, known: KnownRequestHead | None) -> bool:
        """Whether the next message of a connection is for the other process. Asked once for each message.

        `known` is what is known of its head; None where the fast path cannot parse it.
        """

    def move(self, connection: FastConnection, transport: asyncio.Transport, received: bytes) -> bool:
        """Move a connection that has nothing to do, from `received` on, and abort its transport here.

        Returns False if that is not possible: then nothing has changed.
        """


class FastPath:
    """Serves inference requests in front of aiohttp, which it gives the messages that it does not serve itself."""

    aiohttp_server: AiohttpServer

    def __init__(
        self,
        inference: HttpInference,
        rules: RequestRules = _NO_RULES,
        *,
        log_access: bool = False,
        timeouts: ClientTimeouts = TIMEOUTS,
    ) -> None:
        """`rules` are what the operator's options make of requests; with `log_access` every request is logged."""
        self.inference = inference
        self.kernel = inference.kernel
        self.budget = IterationBudget()
        self.messages = inference.messages = MessageBudget(1, MESSAGES_AT_ONCE, in_next_iteration)
        #: How many requests wait for a response behind another one of their connection.
        self.pipelined_count = 0
        self.known_heads = KnownRequestHeads(inference, rules)
        self.log_access = log_access
        #: Whether the log shows the requests that come. Clients may change that at any time.
        self.log_verbose = self.kernel.log.values.log_verbose_level > 0
        self.timeouts = timeouts
        #: None where there is one process.
        self.moves: ConnectionMoves | None = None
        #: Seconds of the event loop's clock at the last tick.
        self.now_s = 0.0
        self.connections: set[FastConnection] = set()
        self.timer: asyncio.TimerHandle | None = None
        self._all_closed: asyncio.Event | None = None

    def open(self, aiohttp_server: AiohttpServer) -> Callable[[], FastConnection]:
        """Return the function that makes its connections."""
        self.aiohttp_server = aiohttp_server
        return functools.partial(FastConnection, self)

    @property
    def connection_count(self) -> int:
        """How many connections it has, without those that it has left to aiohttp."""
        return len(self.connections)

    async def close(self, grace_s: float) -> None:
        """Close idle connections, and others when their requests have responses or `grace_s` seconds are over."""
        self._all_closed = asyncio.Event()
        for connection in list(self.connections):
            connection.close_when_idle()
        if self.connections:
            try:
                async with asyncio.timeout(grace_s):
                    await self._all_closed.wait()
            except TimeoutError:
                for connection in list(self.connections):
                    connection.abort()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def add(self, connection: FastConnection) -> None:
        """Watch over a new connection, on a clock that goes while there is one."""
        if self.timer is None:
            loop = asyncio.get_running_loop()
            self.set_clock(loop.time())
            self.timer = loop.call_later(_TICK_S, self.tick)
        self.connections.add(connection)
        if self._all_closed is not None:
            connection.close_when_idle()

    def remove(self, connection: FastConnection) -> None:
        self.connections.discard(connection)
        if self._all_closed is not None and not self.connections:
            self._all_closed.set()

    def expire(self, now_s: float) -> None:
        """Let all connections look at the time `now_s`."""
        self.set_clock(now_s)
        verbose = self.kernel.log.values.log_verbose_level > 0
        if verbose != self.log_verbose:
            self.log_verbose = verbose
            for connection in self.connections:
                connection.choose_log()
        for connection in list(self.connections):
            connection.expire()
        abort_gone([paused for each in self.connections if (paused := each.paused_transport) is not None])

    def set_clock(self, now_s: float) -> None:
        self.now_s = self.inference.now_s = now_s

    def tick(self) -> None:
        loop = asyncio.get_running_loop()
        self.expire(loop.time())
        self.timer = loop.call_later(_TICK_S, self.tick) if self.connections else None
