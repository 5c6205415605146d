"""Compares two states of one server in short slices of load, over the same connections.

A machine is never equally fast for long: clocks, caches and other programs change its speed by more than what many
changes cost. So slices are short, and both states are measured one directly after the other, in an order that drift
does not favour (A B B A or B A A B, by chance). Each such pair gives a ratio; their median and its exact interval
(`bench.intervals`) are the result. A slice has a number of requests, and none is in flight at its ends, so that the
processor time between them belongs to these requests.
"""

from __future__ import annotations

import gc
import select
import time
from typing import TYPE_CHECKING

from bench.intervals import median_interval
from bench.load import RESPONSE_TIMEOUT_S, LoadConnection
from bench.load_clients import BadResponse

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from bench.intervals import Interval
    from bench.load import Spec

#: The kernel's encoding of the clock of a process (clock_getcpuclockid(3)): all its threads, those that have ended too.
_CPUCLOCK_SCHED, _PID_SHIFT = 2, 3


def process_cpu_ns(pid: int) -> int:
    """Return the processor time of a process in nanoseconds. Raises `OSError` for a process that has ended."""
    return time.clock_gettime_ns((~pid << _PID_SHIFT) | _CPUCLOCK_SCHED)


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


class Comparison:
    """The costs of two states, from pairs of slices that follow one another directly."""

    def __init__(self) -> None:
        #: The cost of a slice in each state; equal places are of one pair.
        self.before: list[float] = []
        self.now: list[float] = []

    @property
    def excess(self) -> Interval:
        """How much more the second state costs, as a part of the cost of the first."""
        return median_interval([now / before - 1 for before, now in zip(self.before, self.now, strict=True)])

    @property
    def difference(self) -> Interval:
        """How much more the second state costs, in the unit of the costs."""
        return median_interval([now - before for before, now in zip(self.before, self.now, strict=True)])


def alternate(
    measure: Callable[[bool], float], seconds: float, order: random.Random, least_pairs: int = 6
) -> Comparison:
    """Measure both states in turn for about `seconds`, and at least `least_pairs` pairs.

    `measure` puts the server into the first state or (with True) the second one, and returns the cost of a slice. The
    first result of each state is dropped: caches were cold.
    """
    found = Comparison()
    for state in (False, True):
        measure(state)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or len(found.before) < least_pairs:
        first = bool(order.getrandbits(1))
        for pair in ((first, not first), (not first, first)):
            _add(found, pair, [measure(state) for state in pair])
    return found


def _add(found: Comparison, pair: Sequence[bool], costs: Sequence[float]) -> None:
    for state, cost in zip(pair, costs, strict=True):
        (found.now if state else found.before).append(cost)
