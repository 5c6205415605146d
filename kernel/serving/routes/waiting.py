"""Requests that wait until the rule of their route can decide which version executes them.

They are checked, their tensors are placed, and they count as in flight and in the memory budget. They can be cancelled,
and each has a deadline.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict, deque
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


class _HeldRequest(msgspec.Struct, eq=False):
    """A request that waits. It is in the line of its rule until its wait is over."""

    rule: RouteRule
    wait: Wait
    #: Greater than the numbers of all that began to wait before.
    number: int
    #: None when its wait is over.
    request: Request | None


class _Line(msgspec.Struct):
    """The requests that wait for one rule."""

    #: The oldest first, never empty. In a `dict` the first one would be searched among those that have left it.
    held: OrderedDict[Request, _HeldRequest]
    #: The rule may decide about requests with numbers up to this one.
    decides_to: int = 0


class WaitingRequests:
    """All requests that wait for a rule. The `kernel.serving.request.RequestOwner` of each of them.

    Whatever ends many waits at once ends some in each event-loop iteration, and looks at no others.
    """

    def __init__(self, submit: Callable[[Request], None], clock: Clock) -> None:
        """`submit` submits a request again, whose rule may decide now."""
        self._submit = submit
        self._clock = clock
        self._lines: dict[RouteRule, _Line] = {}
        #: The line of each request that waits.
        self._line_of: dict[Request, _Line] = {}
        self._last_number = 0
        #: Rules that may decide about requests of their lines, the one that has waited for the longest time first.
        self._deciding: deque[RouteRule] = deque()
        #: A heap of deadlines and numbers. Requests whose wait has ended before stay in it until their deadline.
        self._deadlines: list[tuple[int, int, _HeldRequest]] = []
        #: Rings at the first deadline or before; made when it is first needed.
        self._alarm: Alarm | None = None
        self._until_ns: float = math.inf
        #: Rings at the end of an iteration while something is left to do; made when it is first needed.
        self._rest: Alarm | None = None
        #: Set when no request waits; None while no `drain` waits for that.
        self._drained: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._line_of)

    def add(self, request: Request, rule: RouteRule, wait: Wait) -> None:
        """Keep a checked request, and own it until `rule` can decide, or `wait` is over."""
        request.owner = self
        self._last_number += 1
        held = _HeldRequest(rule, wait, self._last_number, request)
        line = self._lines.get(rule)
        if line is None:
            line = self._lines[rule] = _Line(OrderedDict())
        line.held[request] = held
        self._line_of[request] = line
        heapq.heappush(self._deadlines, (wait.until_ns, held.number, held))
        if wait.until_ns < self._until_ns:
            self._set_alarm(wait.until_ns)

    def decide_again(self, rule: RouteRule) -> None:
        """`rule` may decide now: submit the requests that wait for it again, oldest first. They may wait again."""
        line = self._lines.get(rule)
        if line is not None:
            line.decides_to = self._last_number
            if rule not in self._deciding:
                self._deciding.append(rule)
            self._end_some_waits()

    def _end_some_waits(self) -> None:
        """End waits until as many have ended as may in one iteration."""
        left = ENDED_AT_ONCE
        while left and self._deciding:
            left -= self._decide_one()
        self._expire_some(left)
        if self._deciding or self._late():
            if self._rest is None:
                self._rest = self._clock.alarm(self._end_some_waits)
            self._rest.set(ITERATION_END)
        self._changed()

    def _decide_one(self) -> bool:
        """Submit the oldest request about which the next rule may decide. Returns whether there was one."""
        line = self._lines.get(self._deciding[0])
        if line is not None:
            request, held = next(iter(line.held.items()))
            if held.number <= line.decides_to:
                self._forget(request)
                request.owner = None
                self._submit(request)
                return True
        self._deciding.popleft()
        return False

    def _forget(self, request: Request) -> bool:
        """The wait of a request is over. Returns whether it waited."""
        line = self._line_of.pop(request, None)
        if line is None:
            return False
        held = line.held.pop(request)
        held.request = None
        if not line.held:
            del self._lines[held.rule]
        return True

    def fail_all(self, error: ServingError) -> None:
        """Fail every request with `error`. At the end of the server, which waits for nothing any longer."""
        for request in list(self._line_of):
            request.fail(error)

    async def drain(self) -> None:
        """Wait until no request waits."""
        while self._line_of:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()

    def check(self) -> None:
        """Recompute the invariants; for tests."""
        in_lines = [request for line in self._lines.values() for request in line.held]
        assert {*in_lines} == {*self._line_of}, "requests are in a line and not counted, or the other way round"
        for request in in_lines:
            assert not request.finished, f"request {request.id!r} waits after its final response"
            assert request.owner is self, f"request {request.id!r} waits, and another object owns it"
            assert request.budget is not None, f"request {request.id!r} waits, and does not count in the budget"

    # ---- kernel.serving.request.RequestOwner -------------------------------------------------

    def responded(self, request: Request, response: Response) -> None:
        """The request has ended: nobody waits any more."""
        if response.final and self._forget(request):
            self._changed()

    def consumed(self, request: Request, count: int) -> None:
        """No response was sent yet."""

    def cancelled(self, request: Request) -> None:
        """Respond at once: no model has the request."""
        request.fail(RequestCancelled())

    # ---- deadlines ---------------------------------------------------------------------------

    def _late(self) -> bool:
        return bool(self._deadlines) and self._deadlines[0][0] <= self._clock.now_ns()

    def _expire_some(self, most: int) -> None:
        """Refuse up to `most` requests whose wait was too long, and set the alarm to the deadline of the next one."""
        while most and self._late():
            most -= 1  # also for those whose wait was over before
            _, _, held = heapq.heappop(self._deadlines)
            if held.request is not None:
                held.request.refuse(held.wait.error)
        self._until_ns = math.inf
        if self._deadlines and not self._late():
            self._set_alarm(self._deadlines[0][0])

    def _changed(self) -> None:
        if not self._line_of and self._drained is not None:
            self._drained.set()
            self._drained = None

    def _set_alarm(self, until_ns: int) -> None:
        if self._alarm is None:
            self._alarm = self._clock.alarm(self._end_some_waits)
        self._until_ns = until_ns
        self._alarm.set(max(until_ns, self._clock.now_ns() + 1))
