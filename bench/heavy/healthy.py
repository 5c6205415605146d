"""A healthy client: small requests over HTTP and gRPC, one of each every few milliseconds, and how long they took.

A request is due at a fixed time, also while the one before it waits for its response, and its time counts from when it
was due. So a server that stands still for a second has made all requests of that second wait, as it would those of many
clients. `python -m bench.heavy.healthy PORTS` begins to count at each line that it reads, and at the next line prints
what it has counted, `Waits` of each protocol as JSON.
"""

from __future__ import annotations

import gc
import math
import os
import select
import sys
import time

import msgspec

from bench.load import LoadConnection, Spec
from bench.load_clients import BadResponse

#: Seconds between two requests of a protocol.
INTERVAL_S = 0.005


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
    """The connection of one protocol, and its requests: when they were due, and how long they took."""

    def __init__(self, protocol: str, port: int) -> None:
        self.protocol = protocol
        self._spec = Spec(protocol, port, 1, ["healthy"], 0, 0)
        self.connection = LoadConnection(self._spec, 0)
        self.waiting = False
        self.due = 0.0
        self.latencies_s: list[float] = []
        self.failures: list[str] = []

    def send(self) -> None:
        """Send the request that is due."""
        self.waiting = True
        self.connection.send()

    def receive(self) -> bool:
        """Read once. Returns whether the connection is another one."""
        try:
            if self.connection.receive():
                self._end()
            else:
                self.connection.flush()
        except (BadResponse, OSError) as error:
            self.failures.append(str(error)[:200])
            self._end()
            self.connection.socket.close()
            self.connection = LoadConnection(self._spec, 0)
            return True
        return False

    def _end(self) -> None:
        self.waiting = False
        self.latencies_s.append(time.perf_counter() - self.due)
        self.due += INTERVAL_S

    def counted(self) -> Waits:
        """Return what was counted, and count from now on."""
        found = waits(self.latencies_s, self.failures)
        self.latencies_s, self.failures = [], []
        return found


class HealthyClient:
    """Sends until its standard input ends."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._sides = [HealthySide(protocol, port) for protocol, port in ports.items()]
        self._poll = select.epoll()
        self._by_descriptor = {each.connection.socket.fileno(): each for each in self._sides}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)
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
                if not side.waiting and side.due <= min(now, self._last_due):
                    side.send()
            if not any(side.waiting or side.due <= self._last_due for side in self._sides):
                self._print()
            wait_s = min(side.due - now if not side.waiting else INTERVAL_S for side in self._sides)
            for descriptor, _ in self._poll.poll(max(0.0, wait_s)):
                side_ready = self._by_descriptor.get(descriptor)
                if side_ready is not None:
                    self._receive(descriptor, side_ready)
                elif not self._command():
                    return

    def _receive(self, descriptor: int, side: HealthySide) -> None:
        if side.receive():
            del self._by_descriptor[descriptor]
            self._by_descriptor[side.connection.socket.fileno()] = side
            self._poll.register(side.connection.socket, select.EPOLLIN)

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
