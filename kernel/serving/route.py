"""Which version a request goes to that names a model, and requests that wait for the rule of their route.

A front door knows a route, and not the version that executes a request: `Kernel.submit` decides that, once, for each
request. What was prepared for a route holds for every version that it may lead to, because a request for a version
with another signature is checked again.

A request waits until the rule of its route can decide. Until then it is checked, its tensors are placed, and it counts
as in flight and in the memory budget. It can be cancelled, and has a deadline.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import RequestCancelled
from kernel.loop.clock import ITERATION_END
from kernel.serving.request import Request
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.spec import ModelSpec
    from kernel.errors import ServingError
    from kernel.loop.clock import Alarm, Clock
    from kernel.serving.catalog import Catalog
    from kernel.serving.model import Model
    from kernel.serving.response import Response, Sink


class Wait(msgspec.Struct, frozen=True):
    """A rule cannot decide yet: the request waits until `WaitingRequests.decide_again` is called for the rule."""

    #: When the request is refused with `error`, in monotonic nanoseconds.
    until_ns: int
    error: ServingError


class SecondReceiver(Protocol):
    """Gets a request beside the version that executes it, such as a version that is tried with copies of requests."""

    def receive(self, request: Request, model: Model) -> None:
        """Look at a checked `request` with placed tensors, before its version `model` gets it. Never waits or raises.

        The request itself belongs to its version. `kernel.serving.route.second_copy` makes one to submit.
        """


class WithSecond(msgspec.Struct, frozen=True):
    """A rule has chosen `model`, whose response the client gets, and a second receiver."""

    model: Model
    second: SecondReceiver


class RouteRule(Protocol):
    """Decides which version executes a request. A route without a rule leads to one version."""

    def choose(self, request: Request) -> Model | Wait | WithSecond:
        """Return the version for `request`, perhaps with a second receiver, or that the request has to wait.

        Called in `Kernel.submit`; never waits. Called once for each request, and once more after each wait. Raises
        `ServingError` to refuse the request.
        """

    def choose_for(self, request: Request, parent: Request) -> Model | None:
        """Return the version for a request without a version that is made for `parent`; None for the newest one.

        `request` says which sequence it belongs to; it may be `parent` itself. Never waits. Raises `ServingError`.
        """


class ModelRoute(msgspec.Struct, frozen=True):
    """The way of requests with one name and version, as long as the catalog has the same generation."""

    #: The signature: the specification of the versions that execute the requests.
    spec: ModelSpec
    #: The version that executes the requests; for a route with a rule, those for which it makes no difference.
    model: Model
    rule: RouteRule | None = None

    @property
    def in_flight(self) -> int:
        """How many requests have no final response yet."""
        return self.model.in_flight


def route_to(model: Model, rule: RouteRule | None = None) -> ModelRoute:
    """Return the route to a version, or to what `rule` chooses.

    Requests of a sequence that another version has begun go to that one, whatever the route is.
    """
    return ModelRoute(model.spec, model, rule or model.rule)


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


class RouteRules:
    """Set by what knows rules, such as `kernel.traffic.control.Traffic`, and read by the kernel for each request."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        #: Only the models that have a rule.
        self.by_name: dict[str, RouteRule] = {}

    def set(self, name: str, rule: RouteRule | None) -> None:
        """Let `rule` decide which version executes the requests for the model `name`; None ends that."""
        if rule is None:
            self.by_name.pop(name, None)
        else:
            self.by_name[name] = rule
        self.catalog.change()  # routes that front doors know have the former rule


def second_copy(request: Request, sink: Sink) -> Request:
    """Return a request for the same inference, whose responses `sink` gets.

    Submit it at once, with the route of the version that gets it: until then its inputs are in the arena of `request`.
    They are copied, because a model may change its inputs in place. Inputs in regions of clients are shared. No output
    goes to a region of a client. The copy belongs to no sequence, trace or parent and has no timeout: `request` has.
    If it is not submitted after all, the caller calls its `release_leases`.
    """
    inputs = [
        Tensor(each.name, each.datatype, each.shape, span=each.span.shared())
        if each.span is not None and each.span.lease.region.of_client
        else Tensor(each.name, each.datatype, each.shape, each.raw())
        for each in request.inputs
    ]
    outputs = [RequestedOutput(each.name, each.classification) for each in request.outputs]
    return Request(
        request.model_name,
        inputs,
        sink,
        id=request.id,
        outputs=outputs,
        parameters=dict(request.parameters),
        streaming=request.streaming,
        entry_point=request.entry_point,
        batch_size=request.batch_size,
    )
