"""The fast path as a whole: its connections, their clock, and an orderly stop."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

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
    from protocols.http.inference.infer_call import HttpInference

#: How often connections are checked, which is also how exact their timeouts are.
_TICK_S = 1.0

_NO_RULES = RequestRules()


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
        #: Seconds of the event loop's clock at the last tick.
        self.now_s = 0.0
        self._connections: set[FastConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._all_closed: asyncio.Event | None = None

    def open(self, aiohttp_server: AiohttpServer) -> Callable[[], FastConnection]:
        """Return the function that makes its connections."""
        self.aiohttp_server = aiohttp_server
        return functools.partial(FastConnection, self)

    @property
    def connection_count(self) -> int:
        """How many connections it has, without those that it has left to aiohttp."""
        return len(self._connections)

    async def close(self, grace_s: float) -> None:
        """Close idle connections, and others when their requests have responses or `grace_s` seconds are over."""
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
            self._set_clock(loop.time())
            self._timer = loop.call_later(_TICK_S, self._tick)
        self._connections.add(connection)
        if self._all_closed is not None:
            connection.close_when_idle()

    def remove(self, connection: FastConnection) -> None:
        self._connections.discard(connection)
        if self._all_closed is not None and not self._connections:
            self._all_closed.set()

    def expire(self, now_s: float) -> None:
        """Let all connections look at the time `now_s`."""
        self._set_clock(now_s)
        verbose = self.kernel.log.values.log_verbose_level > 0
        if verbose != self.log_verbose:
            self.log_verbose = verbose
            for connection in self._connections:
                connection.choose_log()
        for connection in list(self._connections):
            connection.expire()
        abort_gone([paused for each in self._connections if (paused := each.paused_transport) is not None])

    def _set_clock(self, now_s: float) -> None:
        self.now_s = self.inference.now_s = now_s

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self.expire(loop.time())
        self._timer = loop.call_later(_TICK_S, self._tick) if self._connections else None
