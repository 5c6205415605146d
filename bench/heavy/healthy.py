"""A healthy client: small requests over HTTP and gRPC, one of each every few milliseconds, and how long they took.

A request is due at a fixed time, also while those before it wait for their responses, and its time counts from when it
was due. Each is sent over a connection that has no other request: they stand for clients that know nothing of one
another. `python -m bench.heavy.healthy PORTS` begins to count at each line that it reads, and at the next line prints
what it has counted, `Waits` of each protocol as JSON.
"""

from __future__ import annotations

import gc
import math
import os
import select
import sys
import time
from collections import deque

import msgspec

from bench.load import BadResponse, LoadConnection, Spec

#: Seconds between two requests of a protocol.
INTERVAL_S = 0.005

#: Connections of a protocol: enough for all requests that are due while the server makes no progress for 0.16 s.
CONNECTIONS = 32


class Waits(msgspec.Struct, frozen=True):
    """How long the requests of one protocol took, in milliseconds."""

    requests: int
    p99_ms: float
    longest_ms: float
    #: What was wrong with responses.
    failures: list[str] = []


def waits(latencies_s: list[float], failures: list[str]) -> Waits:
    """Return the figures of latencies, in seconds."""
    ordered = sorted(latencies_s)
    if not ordered:
        return Waits(0, 0.0, 0.0, failures)
    return Waits(len(ordered), ordered[(len(ordered) - 1) * 99 // 100] * 1e3, ordered[-1] * 1e3, failures)


class HealthySide:
    """The connections of one protocol, and its requests: when they were due, and how long they took."""

    def __init__(self, protocol: str, port: int, poll: select.epoll) -> None:
        self.protocol = protocol
        self._spec = Spec(protocol, port, 1, ["healthy"], 0, 0)
        self._poll = poll
        #: They are used in turn: the server closes one that nobody has used for a while.
        self._idle: deque[LoadConnection] = deque()
        #: Connections whose requests wait, by descriptor, and when these were due.
        self._waiting: dict[int, tuple[LoadConnection, float]] = {}
        #: When the next request is due.
        self.due = 0.0
        self._latencies_s: list[float] = []
        self._failures: list[str] = []
        for _ in range(CONNECTIONS):
            self._connect()

    def _connect(self) -> None:
        connection = LoadConnection(self._spec, 0)
        connection.exchange()  # a connection over which nothing has come is closed after a while
        self._poll.register(connection.socket, select.EPOLLIN)
        self._idle.append(connection)

    def send_due(self, until: float) -> None:
        """Send the requests that are due until this time, as far as there are connections."""
        while self._idle and self.due <= until:
            connection = self._idle.popleft()
            self._waiting[connection.socket.fileno()] = connection, self.due
            self.due += INTERVAL_S
            connection.send()

    def wait_s(self, now: float) -> float:
        """Return the time until the next request can be sent, if no response comes before."""
        return max(0.0, self.due - now) if self._idle else INTERVAL_S

    def is_over(self, last_due: float) -> bool:
        """Whether all requests that were due until then have their responses."""
        return not self._waiting and self.due > last_due

    def receive(self, descriptor: int) -> None:
        """Read once from a connection, if it is one of this protocol."""
        connection, due = self._waiting.get(descriptor, (None, 0.0))
        if connection is None:
            return
        try:
            if not connection.receive():
                connection.flush()
                return
            self._idle.append(connection)
        except (BadResponse, OSError) as error:
            self._failures.append(str(error)[:200])
            connection.socket.close()
            self._connect()
        del self._waiting[descriptor]
        self._latencies_s.append(time.perf_counter() - due)

    def counted(self) -> Waits:
        """Return what was counted, and count from now on."""
        found = waits(self._latencies_s, self._failures)
        self._latencies_s, self._failures = [], []
        return found


class HealthyClient:
    """Sends until its standard input ends."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._poll = select.epoll()
        self._sides = [HealthySide(protocol, port, self._poll) for protocol, port in ports.items()]
        self._poll.register(sys.stdin, select.EPOLLIN)
        #: No request begins that is due later.
        self._last_due = math.inf
        self._counting = False

    def run(self) -> None:
        """Send requests, and follow lines of standard input."""
        now = time.perf_counter()
        for side in self._sides:
            side.due = now
        while True:
            now = time.perf_counter()
            for side in self._sides:
                side.send_due(min(now, self._last_due))
            if all(side.is_over(self._last_due) for side in self._sides):
                self._print()
            for descriptor, _ in self._poll.poll(min(side.wait_s(now) for side in self._sides)):
                if descriptor == sys.stdin.fileno():
                    if not self._command():
                        return
                else:
                    for side in self._sides:
                        side.receive(descriptor)

    def _command(self) -> bool:
        """Begin or end to count. Returns False at the end of standard input."""
        if not os.read(sys.stdin.fileno(), 1):
            return False
        if not self._counting:
            for side in self._sides:
                side.counted()
            self._counting = True
        else:
            self._last_due = time.perf_counter() + INTERVAL_S  # one request or more after the end
        return True

    def _print(self) -> None:
        found = {side.protocol: side.counted() for side in self._sides}
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.buffer.flush()
        self._counting, self._last_due = False, math.inf


def main() -> None:
    """Run with the ports that the first argument names, a JSON object by protocol."""
    gc.disable()
    HealthyClient(msgspec.json.decode(sys.argv[1], type=dict[str, int])).run()


if __name__ == "__main__":
    main()
