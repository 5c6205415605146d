"""Requests that wait until the rule of their route can decide which version executes them.

They are checked, their tensors are placed, and they count as in flight and in the memory budget. They can be cancelled,
and each has a deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import RequestCancelled
from kernel.loop.clock import ITERATION_END
from kernel.serving.front_doors.route import Wait  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from kernel.loop.clock import Alarm, Clock
    from kernel.serving.front_doors.route import RouteRule
    from kernel.serving.request import Request
    from kernel.serving.response import Response


#: How many waits end in one event-loop iteration.
ENDED_AT_ONCE = 64


class _HeldRequest(msgspec.Struct):
    rule: RouteRule
    wait: Wait


class WaitingRequests:
    """All requests that wait for a rule, oldest first. The `kernel.serving.request.RequestOwner` of each of them."""

    def __init__(self, submit: Callable[[Request], None], clock: Clock) -> None:
        """`submit` submits a request again, whose rule may decide now."""
        self._submit = submit
        self._clock = clock
        self._waiting: dict[Request, _HeldRequest] = {}
        #: Rings at the first deadline or before; made when it is first needed.
        self._alarm: Alarm | None = None
        self._until_ns: float = math.inf
        #: Requests whose rule may decide, or whose wait is over, that are left for later iterations, the oldest first.
        self._due: deque[tuple[Request, ServingError | None]] = deque()
        #: Rings at the end of an iteration while some are left; made when it is first needed.
        self._rest: Alarm | None = None
        #: Set when no request waits; None while no `drain` waits for that.
        self._drained: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, rule: RouteRule, wait: Wait) -> None:
        """Keep a checked request, and own it until `rule` can decide, or `wait` is over."""
        request.owner = self
        self._waiting[request] = _HeldRequest(rule, wait)
        if wait.until_ns < self._until_ns:
            self._set_alarm(wait.until_ns)

    def decide_again(self, rule: RouteRule) -> None:
        """`rule` may decide now: submit the requests that wait for it again, oldest first. They may wait again.

        Of thousands only some are submitted in each event-loop iteration.
        """
        self._due.extend((request, None) for request, found in self._waiting.items() if found.rule is rule)
        self._end_some_waits()

    def _end_some_waits(self) -> None:
        for _ in range(min(ENDED_AT_ONCE, len(self._due))):
            request, error = self._due.popleft()
            if request not in self._waiting:  # it has ended, or the end of an earlier one has ended it
                continue
            if error is not None:
                request.refuse(error)
            else:
                del self._waiting[request]
                request.owner = None
                self._submit(request)
        if self._due:
            if self._rest is None:
                self._rest = self._clock.alarm(self._end_some_waits)
            self._rest.set(ITERATION_END)
        self._changed()

    def fail_all(self, error: ServingError) -> None:
        """Fail every request with `error`."""
        for request in list(self._waiting):
            request.fail(error)

    async def drain(self) -> None:
        """Wait until no request waits."""
        while self._waiting:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()

    def check(self) -> None:
        """Recompute the invariants; for tests."""
        for request in self._waiting:
            assert not request.finished, f"request {request.id!r} waits after its final response"
            assert request.owner is self, f"request {request.id!r} waits, and another object owns it"
            assert request.budget is not None, f"request {request.id!r} waits, and does not count in the budget"

    # ---- kernel.serving.request.RequestOwner -------------------------------------------------

    def responded(self, request: Request, response: Response) -> None:
        """The request has ended: nobody waits any more."""
        if response.final and self._waiting.pop(request, None) is not None:
            self._changed()

    def consumed(self, request: Request, count: int) -> None:
        """No response was sent yet."""

    def cancelled(self, request: Request) -> None:
        """Respond at once: no model has the request."""
        request.fail(RequestCancelled())

    # ---- deadlines ---------------------------------------------------------------------------

    def _expire(self) -> None:
        now_ns = self._clock.now_ns()
        late = [
            (request, found.wait.error) for request, found in self._waiting.items() if found.wait.until_ns <= now_ns
        ]
        self._due.extend(late)
        self._until_ns = math.inf
        if len(late) < len(self._waiting):
            following = (found.wait.until_ns for found in self._waiting.values() if found.wait.until_ns > now_ns)
            self._set_alarm(min(following))
        self._end_some_waits()

    def _changed(self) -> None:
        if not self._waiting and self._drained is not None:
            self._drained.set()
            self._drained = None

    def _set_alarm(self, until_ns: int) -> None:
        if self._alarm is None:
            self._alarm = self._clock.alarm(self._expire)
        self._until_ns = until_ns
        self._alarm.set(max(until_ns, self._clock.now_ns() + 1))
