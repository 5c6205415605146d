"""Compares two states of one server in short slices of load, over the same connections.

A machine is never equally fast for long: other programs and its own clocks and caches change what a request costs by
more than what is to be seen. So slices are short, and both states are measured one directly after the other, in an
order that drift does not favour (A B B A or B A A B, by chance). What disturbs a slice only adds to its cost: the lower
quartile of the slices of a state is the cost of those that were hardly disturbed. The interval of a result comes from
drawing such groups of four again and again (bootstrap).

A slice has a number of requests, and none is in flight at its ends, so that the processor time between them belongs to
these requests.
"""

from __future__ import annotations

import gc
import random
import select
import time
from typing import TYPE_CHECKING

import msgspec

from bench.load import RESPONSE_TIMEOUT_S, BadResponse, LoadConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from bench.load import Spec

#: The kernel's encoding of the clock of a process (clock_getcpuclockid(3)): all its threads, those that have ended too.
_CPUCLOCK_SCHED, _PID_SHIFT = 2, 3


def process_cpu_ns(pid: int) -> int:
    """Return the processor time of a process in nanoseconds. Raises `OSError` for a process that has ended."""
    return time.clock_gettime_ns((~pid << _PID_SHIFT) | _CPUCLOCK_SCHED)


#: The probability of the limits of an `Estimate`, and how many draws they come from.
CONFIDENCE, _DRAWS = 0.95, 1000


class OpenConnections:
    """Connections that stay open from one slice to the next. Use it in a `with` statement."""

    def __init__(self, spec: Spec) -> None:
        """`spec.seconds` is not used."""
        self._spec = spec
        self._poll = select.epoll()
        self._connections: dict[int, LoadConnection] = {}

    def __enter__(self) -> OpenConnections:
        gc.disable()  # as in `bench.load`
        try:
            for number in range(self._spec.connections):
                connection = LoadConnection(self._spec, number)
                self._connections[connection.socket.fileno()] = connection
                self._poll.register(connection.socket, select.EPOLLIN)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        gc.enable()
        self._poll.close()
        for connection in self._connections.values():
            connection.socket.close()

    def exchange(self, count: int) -> None:
        """Send `count` requests and wait for all responses. Raises `BadResponse`, `OSError`."""
        unsent, missing = count, count
        for connection in self._connections.values():
            if unsent:
                connection.send()
                unsent -= 1
        while missing:
            ready = self._poll.poll(RESPONSE_TIMEOUT_S)
            if not ready:
                raise BadResponse(f"no response for {RESPONSE_TIMEOUT_S:.0f} s")
            for descriptor, _ in ready:
                connection = self._connections[descriptor]
                if not connection.receive():
                    connection.flush()
                    continue
                missing -= 1
                if unsent:
                    connection.send()
                    unsent -= 1


class Estimate(msgspec.Struct, frozen=True):
    """A value, and the limits between which it lies with a probability of `CONFIDENCE`."""

    value: float
    low: float
    high: float


class Group(msgspec.Struct, frozen=True):
    """The costs of four slices that followed one another: two in each state."""

    before: tuple[float, float]
    now: tuple[float, float]


class SliceComparison(msgspec.Struct, frozen=True):
    """The costs of both states, at least one group."""

    groups: list[Group]

    @property
    def before(self) -> float:
        """The cost of a slice in the first state."""
        return _undisturbed([cost for group in self.groups for cost in group.before])

    def excess(self, more: float = 0.0) -> Estimate:
        """Return how much more a slice costs in the second state, as a part of its cost in the first.

        `more` is what the second state costs besides, in the unit of the costs.
        """
        return self._estimate(lambda before, now: (now + more) / before - 1)

    def difference(self) -> Estimate:
        """Return how much more a slice costs in the second state, in the unit of the costs."""
        return self._estimate(lambda before, now: now - before)

    def _estimate(self, result: Callable[[float, float], float]) -> Estimate:
        def of(groups: Sequence[Group]) -> float:
            return result(
                _undisturbed([cost for group in groups for cost in group.before]),
                _undisturbed([cost for group in groups for cost in group.now]),
            )

        generator = random.Random(0)
        drawn = sorted(of(generator.choices(self.groups, k=len(self.groups))) for _ in range(_DRAWS))
        outside = round(_DRAWS * (1 - CONFIDENCE) / 2)
        return Estimate(of(self.groups), drawn[outside], drawn[-1 - outside])


def _undisturbed(costs: list[float]) -> float:
    """Return the lower quartile."""
    return sorted(costs)[len(costs) // 4]


def alternate(
    measure: Callable[[bool], float], seconds: float, order: random.Random, least_groups: int = 4
) -> SliceComparison:
    """Measure both states in turn for about `seconds`, and at least `least_groups` groups.

    `measure` puts the server into the first state or (with True) the second one, and returns the cost of a slice. The
    first result of each state is dropped: caches were cold.
    """
    for state in (False, True):
        measure(state)
    groups: list[Group] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or len(groups) < least_groups:
        outer = bool(order.getrandbits(1))
        first, second, third, fourth = [measure(state) for state in (outer, not outer, not outer, outer)]
        edges, middle = (first, fourth), (second, third)
        groups.append(Group(middle, edges) if outer else Group(edges, middle))
    return SliceComparison(groups)
