"""A load of many connections and models from one thread: each connection always has one request under way.

perf_analyzer asks one model and takes a thread per connection; where connections and models are what grows, the client
must stay the same. Runs as a process of its own: `python -m bench.load SPEC` prints `Sample` as JSON.
"""

from __future__ import annotations

import gc
import select
import socket
import subprocess
import sys
import time
from array import array

import msgspec

from bench.load_clients import LOAD_CLIENTS, BadResponse, LoadClient
from bench.machine import children_of, cpu_times_of

#: What a request may take before the load is given up.
RESPONSE_TIMEOUT_S = 10.0
#: From the first request to the first that counts: at least so long, and at least so many requests to each model.
#: Models of Triton that were just loaded answered their first twenty requests at a tenth of the later rate (64 models:
#: 485 a second, 5,400 ten seconds later), so time alone would flatter whoever warms up faster.
WARM_UP_S, WARM_UP_REQUESTS = 0.3, 100
#: How long that may take.
WARM_UP_LIMIT_S = 60.0


class Spec(msgspec.Struct, frozen=True):
    """A load: connections to a port on loopback, models asked in turn, for so many seconds."""

    protocol: str
    port: int
    connections: int
    models: list[str]
    seconds: float
    #: Whose CPU time is counted: this process, and apart from it its descendants.
    server_pid: int


class Sample(msgspec.Struct, frozen=True):
    """What one load showed. CPU microseconds per request of the server's main process, and of its descendants."""

    rate: float
    p50_us: float
    p99_us: float
    requests: int
    server_cpu_us: float
    worker_cpu_us: float


class LoadNotRun(Exception):
    """The load could not be carried out; the message says why."""


class LoadConnection:
    """A socket, its protocol state, and when its request left."""

    def __init__(self, spec: Spec, number: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", spec.port), timeout=RESPONSE_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer: LoadClient = LOAD_CLIENTS[spec.protocol]()
        self._models = spec.models
        self._next = number
        self.sent_at = 0.0

    def send(self) -> None:
        """Send the next request; small as it is, it fits into the socket's buffer."""
        model = self._models[self._next % len(self._models)]
        self._next += 1
        self.peer.pending += self.peer.request(model)
        self.flush()
        self.sent_at = time.perf_counter()

    def flush(self) -> None:
        if self.peer.pending:
            self.socket.sendall(self.peer.pending)
            self.peer.pending.clear()

    def receive(self) -> bool:
        """Read what is there; returns whether the answer is complete."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise BadResponse("the server closed the connection")
        return self.peer.feed(received)


def run(spec: Spec) -> Sample:
    """Carry a load out, in this thread. Raises `BadResponse`, `OSError`."""
    gc.disable()  # a collection in the client would look like a slow server
    poll = select.epoll()
    connections: dict[int, LoadConnection] = {}
    try:
        for number in range(spec.connections):
            connection = LoadConnection(spec, number)
            connections[connection.socket.fileno()] = connection
            poll.register(connection.socket, select.EPOLLIN)
        for connection in connections.values():
            connection.send()
        _drive(poll, connections, WARM_UP_S, WARM_UP_REQUESTS * len(spec.models))
        before = _cpu(spec.server_pid)
        latencies, elapsed_s = _drive(poll, connections, spec.seconds)
        after = _cpu(spec.server_pid)
    finally:
        poll.close()
        for connection in connections.values():
            connection.socket.close()
    used = {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}
    count = len(latencies)
    if not count:
        raise BadResponse("no request was answered")
    ordered = sorted(latencies)
    return Sample(
        rate=count / elapsed_s,
        p50_us=ordered[count // 2] * 1e6,
        p99_us=ordered[count * 99 // 100] * 1e6,
        requests=count,
        server_cpu_us=used.pop(spec.server_pid) / count * 1e6,
        worker_cpu_us=sum(used.values()) / count * 1e6,
    )


def _drive(
    poll: select.epoll, connections: dict[int, LoadConnection], seconds: float, requests: int = 0
) -> tuple[array[float], float]:
    """Keep every connection busy for so long, and until so many requests have ended.

    Returns their latencies and the time that passed, in seconds.
    """
    latencies = array("d")
    began = now = time.perf_counter()
    while now - began < seconds or len(latencies) < requests:
        if now - began > seconds + WARM_UP_LIMIT_S:
            raise BadResponse(f"only {len(latencies)} of {requests} requests of the warm-up were answered")
        ready = poll.poll(RESPONSE_TIMEOUT_S)
        if not ready:
            raise BadResponse(f"no answer for {RESPONSE_TIMEOUT_S:.0f} s")
        for descriptor, _ in ready:
            connection = connections[descriptor]
            if connection.receive():
                latencies.append(time.perf_counter() - connection.sent_at)
                connection.send()
            else:
                connection.flush()
        now = time.perf_counter()
    return latencies, now - began


def _cpu(pid: int) -> dict[int, float]:
    """Return CPU seconds by process, so that one that ends in between, an unloaded model's, takes nothing away."""
    return {each: cpu_times_of(each).total_s for each in (pid, *children_of(pid))}


def run_apart(spec: Spec) -> Sample:
    """Carry a load out in a process of its own, away from progress bars. Raises `LoadNotRun`."""
    command = [sys.executable, "-m", "bench.load", msgspec.json.encode(spec).decode()]
    timeout_s = spec.seconds + WARM_UP_S + WARM_UP_LIMIT_S + 2 * RESPONSE_TIMEOUT_S + 10
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise LoadNotRun("the load did not end") from None
    if done.returncode:
        raise LoadNotRun(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    return msgspec.json.decode(done.stdout, type=Sample)


def main() -> int:
    """Carry out the load in the first argument."""
    try:
        sample = run(msgspec.json.decode(sys.argv[1], type=Spec))
    except (BadResponse, OSError) as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(sample))
    return 0


if __name__ == "__main__":
    sys.exit(main())
