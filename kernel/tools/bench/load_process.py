"""A load process: `python -m kernel.tools.bench.load_process`, started by `naiad bench`.

It reads messages from its standard input and writes its results to its standard output. It ends when its input does, so
that it never outlives the command.

`LoadLoop` sends prepared requests on its connections and measures their latencies, in one thread with one epoll object.
Nothing is decoded and nothing is made per request but the times; what takes longer than a few microseconds here would
be taken for the server's. Requests of an open loop are due whether or not the server keeps up: a request that must wait
for a slow one before it counts this waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import math
import os
import random
import resource
import select
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from kernel.tools.bench.load_connection import LoadedConnection, open_socket, reason
from kernel.tools.bench.messages import (
    Latencies,
    LatencyHistogram,
    LoadPoint,
    LoadProblem,
    LoadReady,
    LoadSetup,
    MessageFrames,
    PointProgress,
    PointResult,
    StopLoad,
    framed,
    to_process,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kernel.tools.bench.load_connection import LoadState
    from kernel.tools.bench.messages import ToProcess

CONSTANT, POISSON = "constant", "poisson"


class Arrivals:
    """The due times of one process, in nanoseconds from the beginning, one after the other."""

    def __init__(
        self, rate: float, *, phase: float = 0.0, distribution: str = CONSTANT, uniform: Callable[[], float]
    ) -> None:
        """`rate` requests per second.

        `phase` between 0 and 1 is the part of an interval before the first one, so that several processes take turns.
        `uniform` returns random numbers from 0 up to 1; only `POISSON` asks it.
        """
        self._interval_ns = 1e9 / rate
        self._uniform = uniform
        self._poisson = distribution == POISSON
        self._number = 0
        self._due = phase * self._interval_ns
        if self._poisson:
            self._due = self._gap()

    @property
    def due_ns(self) -> int:
        """When the next request is due."""
        return int(self._due)

    def next(self) -> None:
        """Go on to the request after this one."""
        if self._poisson:
            self._due += self._gap()
        else:
            self._due += self._interval_ns

    def _gap(self) -> float:
        return -math.log(1.0 - self._uniform()) * self._interval_ns


#: As in `protocols/clients/http_load.py`, which this package cannot import.
_DONE = 1

_PROGRESS_NS = 250_000_000

_LOOK_NS = 100_000_000

#: Connections of an open loop that are open before it begins. More are opened when all are busy.
_OPEN_AHEAD = 16

#: The most different errors that are kept.
_MAX_ERRORS = 20

#: Pause before a connection that could not be opened is tried again.
_RECONNECT_NS = 200_000_000

NowNs = time.monotonic_ns


class LoadLoop:
    """The connections of a load process. They stay open from one load to the next."""

    def __init__(
        self, setup: LoadSetup, new_state: Callable[[], LoadState], id_bytes: Callable[[int], bytes], control: int
    ) -> None:
        """`control` is a descriptor that becomes readable when `stopped` must be asked."""
        self._setup = setup
        self._new_state = new_state
        self._id_bytes = id_bytes
        self._control = control
        self._epoll = select.epoll()
        self._epoll.register(control, select.EPOLLIN)
        self._connections: list[LoadedConnection] = []
        self._by_fd: dict[int, LoadedConnection] = {}
        self._timeout_ns = round(setup.timeout_s * 1e9)
        self._next_sequence = setup.first_sequence
        self._measure_ns = self._end_ns = 0
        #: Processor time at the beginning of what counts; and in what counts, from its end on.
        self._cpu_at_ns: int | None = None
        self._cpu_ns = 0
        self._in_flight = self._completed = self._failed = self._responses = 0

    def open(self, count: int) -> None:
        """Open connections until there are `count`. Raises `OSError`."""
        while len(self._connections) < count:
            requests = self._setup.requests[len(self._connections) % len(self._setup.requests)]
            connection = LoadedConnection(self._epoll, self._connect, requests)
            self._connections.append(connection)
            self._by_fd[connection.fd] = connection

    def _connect(self) -> tuple[socket.socket, LoadState]:
        return open_socket(self._setup.host, self._setup.port), self._new_state()

    def run(
        self, point: LoadPoint, stopped: Callable[[], bool], report: Callable[[PointProgress], None]
    ) -> PointResult:
        """Run a load. `stopped` is asked when the control descriptor is readable. Raises `OSError`."""
        self._begin(point)
        free = self._connections[: point.connections]
        self._free = deque(free)
        next_look = next_report = 0
        while True:
            now = NowNs()
            if now >= self._measure_ns and self._cpu_at_ns is None:
                self._cpu_at_ns = time.process_time_ns()
            if now >= self._end_ns and self._finished(now):
                return self._result()
            self._send_due(now)
            if now >= next_look:
                self._look(now)
                next_look = now + _LOOK_NS
                if now >= next_report:
                    report(PointProgress(self._completed, self._failed))
                    next_report = now + _PROGRESS_NS
            for fd, events in self._wait(now):
                if fd == self._control:
                    if stopped():
                        self._end_ns = min(self._end_ns, NowNs())
                    continue
                connection = self._by_fd.get(fd)
                if connection is None:  # closed by an event before this one
                    continue
                try:
                    if events & select.EPOLLOUT:
                        connection.writable()
                    if events & ~select.EPOLLOUT:
                        self._receive(connection)
                except OSError as error:
                    self._lost(connection, f"the connection failed: {reason(error)}")

    def _begin(self, point: LoadPoint) -> None:
        self._point = point
        self._arrivals = (
            Arrivals(
                point.rate, phase=point.phase, distribution=point.distribution,
                uniform=random.Random(point.seed).random,
            )
            if point.rate
            else None
        )  # fmt: skip
        self.open(min(point.connections, _OPEN_AHEAD) if point.rate else point.connections)
        self._measure_ns, self._end_ns = point.measure_ns, point.end_ns
        self._in_flight = self._completed = self._failed = self._responses = 0
        self._unsent = self._most_waiting = 0
        self._waiting: deque[int] = deque()
        self._latencies, self._firsts = LatencyHistogram(), LatencyHistogram()
        self._gaps, self._lateness = LatencyHistogram(), LatencyHistogram()
        self._errors: Counter[str] = Counter()
        self._by_second: list[int] = []
        self._cpu_at_ns, self._cpu_ns = None, 0
        #: Connections that could not be opened again, and when they are tried.
        self._broken: list[tuple[int, LoadedConnection]] = []

    def _wait(self, now: int) -> list[tuple[int, int]]:
        """Wait for events. The timeouts of epoll are milliseconds, which is too coarse for when a request is due."""
        if self._arrivals is None or now >= self._end_ns:
            return self._epoll.poll(0.05 if now < self._end_ns else 0.005)
        until = min(self._point.start_ns + self._arrivals.due_ns, self._end_ns)
        wait_ns = min(until - now, _LOOK_NS)
        if wait_ns > 0:
            select.select((self._epoll,), (), (), wait_ns / 1e9)
        return self._epoll.poll(0)

    # ---- sending

    def _send_due(self, now: int) -> None:
        if now < self._point.start_ns:
            return
        if self._arrivals is None:
            while self._free and now < self._end_ns:
                self._send(self._free.popleft(), now)
            return
        arrivals, start_ns = self._arrivals, self._point.start_ns
        while (due := start_ns + arrivals.due_ns) <= now and due < self._end_ns:
            arrivals.next()
            self._waiting.append(due)
            if self._free or self._grow():
                self._send_waiting(due_only=due)
        self._most_waiting = max(self._most_waiting, len(self._waiting))

    def _grow(self) -> bool:
        """Open one more connection for an open loop, if it may have more. Returns whether there is one now."""
        if len(self._connections) >= self._point.connections:
            return False
        try:
            self.open(len(self._connections) + 1)
        except OSError as error:
            self._count_error(f"no further connection: {reason(error)}")
            return False
        self._free.append(self._connections[-1])
        return True

    def _send_waiting(self, due_only: int = 0) -> None:
        due = self._waiting.popleft()
        now = NowNs()
        if due == due_only and due >= self._measure_ns:  # a connection was free all the time
            self._lateness.record(now - due)
        self._send(self._free.popleft(), now, due)

    def _send(self, connection: LoadedConnection, now: int, due: int = 0) -> None:
        """Send the next request of a connection; `due` is when it should have been sent."""
        connection.begin_ns = now
        connection.due_ns = due or now
        if self._setup.sequence_length:
            last = connection.step == self._setup.sequence_length - 1 or now >= self._end_ns
            if not connection.step:
                connection.sequence = self._id_bytes(self._next_sequence)
                self._next_sequence += 1
            request = connection.next_of_sequence(last=last)
        else:
            request = connection.next_request()
        self._in_flight += 1
        try:
            connection.send(request)
        except OSError as error:
            connection.in_flight = True
            self._lost(connection, f"the connection failed: {reason(error)}")

    # ---- receiving

    def _receive(self, connection: LoadedConnection) -> None:
        outcome = connection.receive()
        if not connection.in_flight:
            if not connection.state.usable:
                self._reopen(connection)
            return
        now = NowNs()
        if not outcome:
            if connection.state.responses and not connection.first_ns:
                connection.first_ns = now
            return
        if outcome == _DONE:
            self._count(connection, now)
        else:
            self._fail(connection, connection.state.error)
        connection.in_flight = False
        self._in_flight -= 1
        if not connection.state.usable:
            self._reopen(connection)
            if connection.fd < 0:
                return
        self._next(connection, now)

    def _next(self, connection: LoadedConnection, now: int) -> None:
        """The connection is free."""
        if now >= self._end_ns:
            if connection.step:  # the server keeps the state of a sequence until its END
                self._send(connection, now)
            elif self._waiting:
                self._free.append(connection)
            return
        if self._arrivals is None:
            self._send(connection, now)
            return
        self._free.append(connection)
        if self._waiting:
            self._send_waiting()

    def _count(self, connection: LoadedConnection, now: int) -> None:
        """Count a success, if it belongs to the time that counts."""
        if self._arrivals is None:
            counts = self._measure_ns <= now <= self._end_ns
        else:
            counts = self._measure_ns <= connection.due_ns < self._end_ns
        if not counts:
            return
        self._latencies.record(now - connection.due_ns)
        responses = connection.state.responses
        self._responses += responses
        if self._setup.streaming:
            first_ns = connection.first_ns or now
            self._firsts.record(first_ns - connection.due_ns)
            if responses > 1:
                self._gaps.record((now - first_ns) // (responses - 1))
        if now <= self._end_ns:
            self._completed += 1
            second = (now - self._measure_ns) // 1_000_000_000
            if second >= 0:
                while second >= len(self._by_second):
                    self._by_second.append(0)
                self._by_second[second] += 1

    def _fail(self, connection: LoadedConnection, text: str) -> None:
        if connection.begin_ns >= self._measure_ns or NowNs() >= self._measure_ns:
            self._count_error(text)
        connection.step = 0

    def _count_error(self, text: str) -> None:
        self._failed += 1
        self._errors[text if text in self._errors or len(self._errors) < _MAX_ERRORS else "other errors"] += 1

    # ---- connections that are lost

    def _lost(self, connection: LoadedConnection, text: str) -> None:
        if connection.in_flight:
            self._fail(connection, text)
            connection.in_flight = False
            self._in_flight -= 1
        self._reopen(connection)
        if connection.fd >= 0 and connection not in self._free:
            self._free.append(connection)

    def _reopen(self, connection: LoadedConnection) -> None:
        """Connect again; if that fails, `_look` tries again later."""
        self._by_fd.pop(connection.fd, None)
        connection.close()
        try:
            connection.open()
        except OSError as error:
            if NowNs() >= self._measure_ns:
                self._count_error(f"no connection: {reason(error)}")
            self._broken.append((NowNs() + _RECONNECT_NS, connection))
            if connection in self._free:
                self._free.remove(connection)
            return
        self._by_fd[connection.fd] = connection

    def _look(self, now: int) -> None:
        """Fail requests whose responses do not come, and open lost connections again."""
        for connection in self._connections:
            if connection.in_flight and now - connection.begin_ns > self._timeout_ns:
                self._lost(connection, f"no response within {self._setup.timeout_s:g} s")
        due = [each for each in self._broken if each[0] <= now]
        for each in due:
            self._broken.remove(each)
            self._reopen(each[1])
            if each[1].fd >= 0:
                self._free.append(each[1])

    # ---- the end

    def _finished(self, now: int) -> bool:
        """Whether the load has ended: nothing is in flight. Requests that were due and not sent are given up."""
        if not self._cpu_ns and self._cpu_at_ns is not None:
            self._cpu_ns = max(1, time.process_time_ns() - self._cpu_at_ns)
        while self._free:
            connection = self._free.popleft()
            if connection.step:  # the server keeps the state of a sequence until its END
                self._send(connection, now)
        while self._waiting:
            due = self._waiting.popleft()
            if due >= self._measure_ns:
                self._unsent += 1
                self._latencies.record(now - due)
        return not self._in_flight

    def _result(self) -> PointResult:
        return PointResult(
            _sent(self._latencies), _sent(self._firsts), _sent(self._gaps), _sent(self._lateness), self._completed,
            self._responses, self._by_second, dict(self._errors), self._unsent, self._most_waiting,
            max(0, self._end_ns - self._measure_ns), self._cpu_ns,
        )  # fmt: skip


def _sent(histogram: LatencyHistogram) -> Latencies:
    return Latencies(histogram.as_map(), histogram.total, histogram.largest)


#: prctl: how late the system may wake this process, in nanoseconds, so that it wakes others at the same time.
_SET_TIMER_SLACK = 29

_INPUT, _OUTPUT = 0, 1


class _Commands:
    """The messages of the standard input."""

    def __init__(self) -> None:
        self._frames = MessageFrames()
        self._found: deque[ToProcess] = deque()

    def next(self) -> ToProcess:
        """Wait for the next message. Ends the process at the end of the input."""
        while not self._found:
            self._read()
        return self._found.popleft()

    def stopped(self) -> bool:
        """Read once; return whether the load must end now."""
        self._read()
        stop = any(isinstance(each, StopLoad) for each in self._found)
        self._found = deque(each for each in self._found if not isinstance(each, StopLoad))
        return stop

    def _read(self) -> None:
        data = os.read(_INPUT, 1 << 20)
        if not data:
            os._exit(0)  # the command has ended
        self._found.extend(to_process.decode(each) for each in self._frames.feed(data))


def _write(message: Any) -> None:
    data = memoryview(framed(message))
    while data:
        try:
            data = data[os.write(_OUTPUT, data) :]
        except BlockingIOError:
            select.select((), (_OUTPUT,), ())
        except BrokenPipeError:
            os._exit(0)


def main() -> None:
    """Run loads until the input ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError, ValueError):  # each connection is a file
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    commands = _Commands()
    setup = commands.next()
    assert isinstance(setup, LoadSetup)
    module: Any = importlib.import_module(setup.protocol_module)
    new_state = functools.partial(module.connect, setup.head, streaming=setup.streaming, has_final=setup.has_final)
    loop = LoadLoop(setup, new_state, module.sequence_id_bytes, _INPUT)
    gc.freeze()
    gc.disable()  # nothing here has cycles; a collection would stand in the latencies
    _write(LoadReady())
    while True:
        message = commands.next()
        if not isinstance(message, LoadPoint):  # a load that had ended already should be stopped
            continue
        try:
            _write(loop.run(message, commands.stopped, _write))
        except OSError as error:
            _write(LoadProblem(f"no connection to {setup.host}:{setup.port}: {reason(error)}"))


if __name__ == "__main__":
    main()
