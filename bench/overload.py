"""`python -m bench overload`: a model of 10 ms with one instance gets ten times what it can do, in an open loop.

Requests come at fixed times, whatever the server does: over gRPC with a deadline, over HTTP each with a connection of
its own. A client in another process asks for health meanwhile.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import msgspec
from rich.console import Console

from bench.server import ServerProcess, rss_bytes
from protocols.grpc.generated.grpc_service_pb2 import ModelInferRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: Requests a second, for how many seconds, and the deadline of each over gRPC.
RATE, SECONDS, TIMEOUT_S = 1000, 10, 0.5

_EXECUTION_MS = 10

_CONFIG = """
backend: "identity"
input [{ name: "IN" data_type: TYPE_UINT8 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_UINT8 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
parameters { key: "execute_delay_ms" value { string_value: "%d" } }
"""

#: Over HTTP no deadline is known: the queue has a limit, which is half a second of work.
_LIMITED_QUEUE = """
dynamic_batching { default_queue_policy { max_queue_size: 50 } }
max_batch_size: 1
"""

_INFER = "/inference.GRPCInferenceService/ModelInfer"

_HEALTH_CLIENT = """
import http.client, sys, time
waits = []
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    begin = time.monotonic()
    connection.request("GET", "/v2/health/live")
    connection.getresponse().read()
    waits.append((time.monotonic() - begin) * 1000)
    time.sleep(0.005)
waits.sort()
print(waits[len(waits) * 99 // 100])
"""


class Overload(msgspec.Struct):
    """What was measured over one protocol. Times are in milliseconds, memory in MiB."""

    peak_per_s: float
    goodput_per_s: float
    refused: int
    refusal_p99_ms: float
    failed: int
    health_p99_ms: float
    memory_growth_mib: float
    recovery_ms: float


class _Outcome(msgspec.Struct):
    """One request: `ok`, `refused` or something else, and how long it took."""

    kind: str
    took_s: float


async def _grpc_request(channel: grpc.aio.Channel, message: bytes) -> str:
    call = channel.unary_unary(_INFER)
    try:
        await call(message, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return "refused" if error.code() is grpc.StatusCode.UNAVAILABLE else error.code().name
    return "ok"


async def _http_request(port: int, head: bytes, body: bytes) -> str:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        return type(error).__name__
    try:
        writer.write(head + body)
        response = await reader.read()
    except OSError as error:
        return type(error).__name__
    finally:
        writer.close()
    if response.startswith(b"HTTP/1.1 503") and b"\r\nRetry-After: " in response:
        return "refused"
    return "ok" if response.startswith(b"HTTP/1.1 200") else response[:12].decode("latin-1")


async def _timed(request: Callable[[], Awaitable[str]], outcomes: list[_Outcome]) -> None:
    begin_s = time.monotonic()
    kind = await request()
    outcomes.append(_Outcome(kind, time.monotonic() - begin_s))


async def _open_loop(request: Callable[[], Awaitable[str]], outcomes: list[_Outcome]) -> None:
    """Send requests at their times, and wait for all of them."""
    begin_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(RATE * SECONDS):
            ahead_s = begin_s + number / RATE - time.monotonic()
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)
            elif not number % 32:
                await asyncio.sleep(0)
            tasks.create_task(_timed(request, outcomes))


async def _peak(request: Callable[[], Awaitable[str]]) -> float:
    """Return the requests a second of two clients that wait for their responses."""
    outcomes: list[_Outcome] = []
    end_s = time.monotonic() + 2

    async def client() -> None:
        while time.monotonic() < end_s:
            await _timed(request, outcomes)

    await asyncio.gather(client(), client())
    return sum(each.kind == "ok" for each in outcomes) / 2


def _health_client(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _HEALTH_CLIENT, str(port), str(SECONDS)], stdout=subprocess.PIPE)


async def _measure(server: ServerProcess, request: Callable[[], Awaitable[str]]) -> Overload:
    peak = await _peak(request)
    before = rss_bytes(server.pid)
    with _health_client(server.http_port) as health:
        outcomes: list[_Outcome] = []
        await _open_loop(request, outcomes)
        growth = rss_bytes(server.pid) - before
        ended_s = time.monotonic()
        while True:
            begin_s = time.monotonic()
            if await request() == "ok" and time.monotonic() - begin_s < 5 * _EXECUTION_MS / 1000:
                break
        recovery_s = time.monotonic() - ended_s
        assert health.stdout is not None
        health_ms = float(await asyncio.to_thread(health.stdout.read))
    refusals = sorted(each.took_s * 1000 for each in outcomes if each.kind == "refused")
    served = sum(each.kind == "ok" for each in outcomes)
    return Overload(
        peak,
        served / SECONDS,
        len(refusals),
        refusals[len(refusals) * 99 // 100] if refusals else 0.0,
        len(outcomes) - served - len(refusals),
        health_ms,
        growth / 2**20,
        recovery_s * 1000,
    )


async def measure_grpc(server: ServerProcess) -> Overload:
    """Measure over gRPC, with 64 connections."""
    tensor = ModelInferRequest.InferInputTensor(name="IN", datatype="UINT8", shape=[16])
    message = ModelInferRequest(model_name="deadline", inputs=[tensor], raw_input_contents=[bytes(16)])
    text = message.SerializeToString()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(server.grpc_url, options) for _ in range(64)]
    turn = 0

    async def request() -> str:
        nonlocal turn
        turn += 1
        return await _grpc_request(channels[turn % len(channels)], text)

    try:
        return await _measure(server, request)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def measure_http(server: ServerProcess) -> Overload:
    """Measure over HTTP, each request with a connection of its own."""
    body = b'{"inputs":[{"name":"IN","datatype":"UINT8","shape":[1,4],"data":[1,2,3,4]}]}'
    head = b"POST /v2/models/limited/infer HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return await _measure(server, lambda: _http_request(server.http_port, head % len(body), body))


def measure() -> dict[str, Overload]:
    """Measure both protocols, with a server of its own for each."""
    found: dict[str, Overload] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (("deadline", ""), ("limited", _LIMITED_QUEUE)):
            (Path(folder) / name / "1").mkdir(parents=True)
            (Path(folder) / name / "config.pbtxt").write_text(_CONFIG % _EXECUTION_MS + more)
        for name, run in (("gRPC", measure_grpc), ("HTTP", measure_http)):
            with ServerProcess(Path(folder)) as server:
                found[name] = asyncio.run(run(server))
    return found


def print_overload() -> None:
    """Measure, and print a line for each protocol."""
    console = Console()
    for name, each in measure().items():
        console.print(
            f"{name}: {each.goodput_per_s:.0f} of {each.peak_per_s:.0f} responses/s "
            f"({each.goodput_per_s / each.peak_per_s:.0%}), {each.refused} refused (p99 {each.refusal_p99_ms:.1f} ms), "
            f"{each.failed} failed, health p99 {each.health_p99_ms:.1f} ms, memory {each.memory_growth_mib:+.1f} MiB, "
            f"recovery {each.recovery_ms:.0f} ms"
        )
