"""A load of many connections and models from one thread. Each connection always has one request in flight.

perf_analyzer sends requests to one model and uses a thread per connection. Where the number of connections or models
grows, the client itself must not grow. It runs in its own process: `python -m bench.load SPEC` prints a `Sample` as
JSON.
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

from bench.load_clients import ADD_SUB, LOAD_CLIENTS, BadResponse, Inputs, LoadClient
from bench.machine import children_of, cpu_times_of

#: The load ends with an error when a response takes longer.
RESPONSE_TIMEOUT_S = 10.0
#: The warm-up, which is not counted: its shortest time, and the smallest number of requests to each model. Time alone
#: is not enough: models that Triton had just loaded served their first twenty requests at a tenth of the later rate
#: (64 models: 485 requests/s, and 5,400 ten seconds later).
WARM_UP_S, WARM_UP_REQUESTS = 0.3, 100
#: The longest time of the warm-up.
WARM_UP_LIMIT_S = 60.0


class Spec(msgspec.Struct, frozen=True):
    """A load: connections to a port on loopback, which send requests to the models in turn for `seconds`."""

    protocol: str
    port: int
    connections: int
    models: list[str]
    seconds: float
    #: The server's main process. Its CPU time and that of its descendants are counted separately.
    server_pid: int
    inputs: Inputs = ADD_SUB


class Sample(msgspec.Struct, frozen=True):
    """The result of a load. CPU times are microseconds per request, of the main process and of its descendants."""

    rate: float
    p50_us: float
    p99_us: float
    requests: int
    server_cpu_us: float
    worker_cpu_us: float


class LoadNotRun(Exception):
    """The load could not be run; the message says why."""


class LoadConnection:
    """A socket, its protocol state, and when its last request was sent."""

    def __init__(self, spec: Spec, number: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", spec.port), timeout=RESPONSE_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.client: LoadClient = LOAD_CLIENTS[spec.protocol](spec.inputs)
        self._models = spec.models
        self._next = number
        self.sent_at = 0.0

    def send(self) -> None:
        """Send the next request. It is small enough for the socket's buffer."""
        model = self._models[self._next % len(self._models)]
        self._next += 1
        self.client.pending += self.client.request(model)
        self.flush()
        self.sent_at = time.perf_counter()

    def exchange(self) -> None:
        """Send the next request and wait for its response. Raises `BadResponse`, `OSError`."""
        self.send()
        while not self.receive():
            self.flush()

    def flush(self) -> None:
        if self.client.pending:
            self.socket.sendall(self.client.pending)
            self.client.pending.clear()

    def receive(self) -> bool:
        """Read once. Returns whether the response is complete."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise BadResponse("the server closed the connection")
        return self.client.feed(received)


def run(spec: Spec) -> Sample:
    """Run a load in this thread. Raises `BadResponse`, `OSError`."""
    gc.disable()  # a garbage collection in the client would look like a slow server
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
        raise BadResponse("no request was completed")
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
    """Keep every connection busy for at least `seconds`, and until `requests` have completed.

    Returns their latencies and the elapsed time, in seconds.
    """
    latencies = array("d")
    began = now = time.perf_counter()
    while now - began < seconds or len(latencies) < requests:
        if now - began > seconds + WARM_UP_LIMIT_S:
            raise BadResponse(f"only {len(latencies)} of {requests} requests of the warm-up were completed")
        ready = poll.poll(RESPONSE_TIMEOUT_S)
        if not ready:
            raise BadResponse(f"no response for {RESPONSE_TIMEOUT_S:.0f} s")
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
    """Return CPU seconds by process. So a worker that ends during the load (its model is unloaded) changes nothing."""
    return {each: cpu_times_of(each).total_s for each in (pid, *children_of(pid))}


def run_apart(spec: Spec) -> Sample:
    """Run a load in its own process, apart from progress bars. Raises `LoadNotRun`."""
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
    """Run the load that the first argument describes."""
    try:
        sample = run(msgspec.json.decode(sys.argv[1], type=Spec))
    except (BadResponse, OSError) as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(sample))
    return 0


if __name__ == "__main__":
    sys.exit(main())
