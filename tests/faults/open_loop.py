"""An open-loop load of both protocols: requests are due at fixed times, however long those before them take.

`python -m tests.faults.open_loop SPEC` prints an `OpenLoad` as JSON. Requests that find no free connection wait for
one, and their time counts from when they were due.
"""

from __future__ import annotations

import contextlib
import gc
import select
import socket
import subprocess
import sys
import time
from collections import deque

import msgspec

from bench.checkout import ROOT
from bench.load import BadResponse, GrpcLoadClient, HttpLoadClient

#: How long the last responses may take after the last request was due.
DRAIN_S = 10.0


class OpenSpec(msgspec.Struct, frozen=True):
    """`rate` requests a second in all, in turn over HTTP and gRPC. `short`: each with a connection of its own."""

    http_port: int
    grpc_port: int
    model: str
    rate: float
    seconds: float
    connections: int = 32
    short: bool = False


class OpenLoad(msgspec.Struct):
    """What became of the requests; times in milliseconds."""

    sent: int = 0
    successes: int = 0
    refusals: int = 0
    #: Refusals that say when to come again.
    hinted: int = 0
    others: int = 0
    unanswered: int = 0
    seconds: float = 0.0
    success_ms: list[float] = []
    refusal_ms: list[float] = []
    texts: list[str] = []


class HttpClient(HttpLoadClient):
    """Takes refusals, too: `refused` has their text."""

    refused = ""
    hinted = False

    def feed(self, received: bytes) -> bool:
        self._buffer += received
        head, _, body = self._buffer.partition(b"\r\n\r\n")
        fields = bytes(head).lower()
        length = fields.partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not length or len(body) < int(length):
            return False
        self.refused = (
            "" if fields.startswith(b"http/1.1 200") else f"{bytes(head[9:12]).decode()} {bytes(body).decode()}"
        )
        self.hinted = b"retry-after:" in fields
        self._buffer.clear()
        return True


class GrpcClient(GrpcLoadClient):
    """Takes refusals, too."""

    refused = ""
    hinted = False

    def _take_headers(self, flags: int, block: bytes) -> bool:
        try:
            done = super()._take_headers(flags, block)
        except BadResponse as error:
            self.refused = str(error)
            fields = {str(each[0]) for each in self._decoder.decode(block)}
            self.hinted = "grpc-retry-pushback-ms" in fields
            return True
        if done:
            self.refused = ""
        return done


class _Connection:
    def __init__(self, port: int, client: HttpClient | GrpcClient) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.client = client
        self.due = 0.0

    def send(self, model: str) -> None:
        self.client.pending += self.client.request(model)
        self.flush()

    def flush(self) -> None:
        if self.client.pending:
            self.socket.sendall(self.client.pending)
            self.client.pending.clear()


class OpenLoop:
    """The connections, and the requests that are due."""

    def __init__(self, spec: OpenSpec) -> None:
        self._spec = spec
        self._poll = select.epoll()
        self._busy: dict[int, _Connection] = {}
        self._idle: list[deque[_Connection]] = [deque(), deque()]
        self.found = OpenLoad()
        if not spec.short:
            for side in (0, 1):
                self._idle[side].extend(self._connect(side) for _ in range(spec.connections))

    def _connect(self, side: int) -> _Connection:
        client = GrpcClient() if side else HttpClient()
        connection = _Connection(self._spec.grpc_port if side else self._spec.http_port, client)
        self._poll.register(connection.socket, select.EPOLLIN)
        return connection

    def run(self) -> OpenLoad:
        """Send until the time is over, and wait for what is still out."""
        began = time.perf_counter()
        interval, number = 1 / self._spec.rate, 0
        end = began + self._spec.seconds
        while True:
            now = time.perf_counter()
            due = began + number * interval
            while due <= min(now, end) and self._begin(number % 2, due):
                number += 1
                due = began + number * interval
            if now > end and (not self._busy or now > end + DRAIN_S):
                break
            wait_s = max(0.0, due - now) if now < end else 0.05
            for descriptor, _ in self._poll.poll(min(wait_s, 0.05)):
                self._receive(self._busy.get(descriptor), descriptor)
        self.found.unanswered = len(self._busy)
        self.found.seconds = self._spec.seconds
        return self.found

    def _begin(self, side: int, due: float) -> bool:
        if not self._idle[side]:
            if not self._spec.short:
                return False
            self._idle[side].append(self._connect(side))
        connection = self._idle[side].popleft()
        connection.due = due
        self._busy[connection.socket.fileno()] = connection
        connection.send(self._spec.model)
        self.found.sent += 1
        return True

    def _receive(self, connection: _Connection | None, descriptor: int) -> None:
        if connection is None:
            return
        try:
            received = connection.socket.recv(1 << 16)
            if not received:
                raise BadResponse("the server closed the connection")
            done = connection.client.feed(received)
            connection.flush()
        except (OSError, BadResponse) as error:
            self._end(connection, f"cut: {error}")
            return
        if done:
            self._end(connection, connection.client.refused)

    def _end(self, connection: _Connection, text: str) -> None:
        found, took_ms = self.found, (time.perf_counter() - connection.due) * 1e3
        del self._busy[connection.socket.fileno()]
        if not text:
            found.successes += 1
            found.success_ms.append(took_ms)
        elif text.startswith(("503", "429", "grpc-status 14", "grpc-status 8")):
            found.refusals += 1
            found.hinted += connection.client.hinted
            found.refusal_ms.append(took_ms)
        else:
            found.others += 1
        if text and len(found.texts) < 10 and text not in found.texts:
            found.texts.append(text[:200])
        side = int(isinstance(connection.client, GrpcClient))
        if self._spec.short or text.startswith("cut"):
            with contextlib.suppress(OSError):
                self._poll.unregister(connection.socket)
            connection.socket.close()
            if not self._spec.short:
                self._idle[side].append(self._connect(side))
        else:
            self._idle[side].append(connection)


def run_apart(spec: OpenSpec) -> OpenLoad:
    """Run a load in a process of its own."""
    command = [sys.executable, "-m", "tests.faults.open_loop", msgspec.json.encode(spec).decode()]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=spec.seconds + 60)
    return msgspec.json.decode(done.stdout, type=OpenLoad)


def main() -> None:
    gc.disable()
    found = OpenLoop(msgspec.json.decode(sys.argv[1], type=OpenSpec)).run()
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
