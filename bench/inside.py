"""A whole request through the kernel process, from received bytes to written bytes, without sockets and workers.

This is the Python code that runs for every request: connection, codec, checks, scheduling, messages to and from the
worker, statistics and the response. The responses of the worker are made here, mostly outside of the timed part. Each
measurement has a process of its own, so that it can measure another source tree.
"""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from hpack import Encoder

from backends.supervision.handle import WorkerHandle
from backends.transport import wire
from backends.transport.framing import MAX_WORKER_FRAME, FrameReader, frame
from bench.server import environment
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import ModelSpec, TensorSpec
from kernel.loop.busy_poll import BusyPolling, LoopPoller
from kernel.loop.clock import LoopClock
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import InputPlacer
from kernel.records.tracer import Tracer
from kernel.serving.catalog import Catalog, ModelState
from kernel.serving.interface import KernelSettings
from kernel.serving.kernel import Kernel
from kernel.serving.model import Model
from kernel.settings import LogSettings, TraceSettings
from protocols.grpc.framing import PREFIX
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.h2 import frames
from protocols.grpc.h2.transport import ServerConnection
from protocols.grpc.rpc import OpenCalls
from protocols.grpc.rpcs.infer import InferCall, Inference
from protocols.http.fast.connection import FastConnection
from protocols.http.fast.fast_path import FastPath
from protocols.http.inference.infer_call import HttpInference
from schedulers.direct import direct
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: The paths that are measured. Commits are compared by these names, so a name that changes cannot be compared any more.
PATHS = ("whole request in the kernel: HTTP", "whole request in the kernel: gRPC")

_CODE = "import json; from bench import inside; print(json.dumps(inside.measure()))"

_TIMEOUT_S = 120


def measure_apart(tree: Path) -> dict[str, float]:
    """Return microseconds of CPU time per request by path, measured by the `bench/inside.py` of the tree.

    The result is empty if the tree has no such file, or if it fails.
    """
    if not (tree / "bench" / "inside.py").is_file():  # Python would take the file of an installed checkout
        return {}
    command = [sys.executable, "-c", _CODE]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment(tree), capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    found: dict[str, float] = json.loads(done.stdout) if not done.returncode else {}
    return found


#: Requests that arrive together, as from as many clients. The number of such rounds, of the warm-up and measured.
TOGETHER = 8

WARM_UP, ROUNDS = 200, 1500

_NAMES = ("INPUT0", "INPUT1")

_TENSOR = struct.pack("<16f", *range(16))


def measure() -> dict[str, float]:
    """Return microseconds of CPU time per request by path, the best of three runs."""
    doors: tuple[type[_HttpDoor | _GrpcDoor], ...] = (_HttpDoor, _GrpcDoor)
    return {path: min(asyncio.run(_run(door)) for _ in range(3)) for path, door in zip(PATHS, doors, strict=True)}


async def _run(door_type: type[_HttpDoor | _GrpcDoor]) -> float:
    kernel, worker = _kernel()
    door = door_type(kernel)
    spent_ns = 0
    for number in range(WARM_UP + ROUNDS):
        receive = door.prepared()
        begin_ns = time.process_time_ns()
        receive()
        sent_ns = time.process_time_ns()
        executed = worker.execute()
        executed_ns = time.process_time_ns()
        worker.deliver(executed)
        await asyncio.sleep(0)  # connections write at the end of an event-loop iteration
        if number >= WARM_UP:
            spent_ns += sent_ns - begin_ns + time.process_time_ns() - executed_ns
    door.check(WARM_UP + ROUNDS)
    return spent_ns / ROUNDS / TOGETHER / 1000


def _kernel() -> tuple[Kernel, _Worker]:
    catalog, regions, clock = Catalog(), RegionRegistry(), LoopClock()
    settings = KernelSettings(TraceSettings(), LogSettings())
    tracer = Tracer(settings.trace, clock)
    kernel = Kernel(catalog, regions, InputPlacer(regions, 1 << 24), clock, settings, tracer)
    inputs = {name: TensorSpec(name, "FP32", (16,), (16,)) for name in _NAMES}
    outputs = {name: TensorSpec(name, "FP32", (16,), (16,)) for name in ("OUTPUT0", "OUTPUT1")}
    model = Model(ModelSpec("add_sub", "", "python", 0, inputs, outputs), ModelConfig(), 1, direct, clock)
    model.start()
    catalog.set_state("add_sub", 1, ModelState.READY, "", model)
    worker = _Worker()
    handle = WorkerHandle("add_sub_0", worker, model, LoopPoller(BusyPolling(0, 1)), None)  # type: ignore[arg-type]  # what it uses of a session
    model.instances.add(handle)
    return kernel, worker


class _Worker:
    """A session of a worker that executes a batch as soon as it gets it."""

    local = True
    concurrency = 1
    overlaps = False
    clock_offset_ns = 0
    checks_health = False
    pid = 0

    def __init__(self) -> None:
        self._handlers: wire.Handlers = {}
        self._batches: list[wire.Execute] = []
        self._reader = FrameReader(MAX_WORKER_FRAME)
        outputs = [Tensor(name, "FP32", [16], _TENSOR) for name in ("OUTPUT0", "OUTPUT1")]
        self._response = wire.ResponseMessage(outputs)

    def take_messages(self, handlers: wire.Handlers) -> None:
        self._handlers = handlers

    def send(self, message: wire.Execute) -> None:
        wire.encoder.encode(message)
        self._batches.append(message)

    def take_unsent(self) -> None:
        """Do nothing: this worker holds no messages back."""

    def execute(self) -> bytes:
        """Return the framed responses to the batches that have been sent since the last call."""
        batches, self._batches = self._batches, []
        executed = [wire.Executed(each.batch, [self._response], 0, 1_000, 3_000, 6_000) for each in batches]
        return b"".join(frame(wire.encoder.encode(message)) for message in executed)

    def deliver(self, executed: bytes) -> None:
        """Deliver framed responses, and then those to the batches that are sent meanwhile."""
        while executed:
            for raw in self._reader.feed(executed):
                message = wire.to_kernel_decoder.decode(raw)
                self._handlers[type(message)](message)
            executed = self.execute()


class _Transport:
    """Counts the bytes that are written."""

    def __init__(self) -> None:
        self.written = 0

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def writelines(self, pieces: list[bytes]) -> None:
        self.written += sum(map(len, pieces))

    def set_write_buffer_limits(self, high: int = 0) -> None:
        """Do nothing: there is no buffer."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return True


class _HttpDoor:
    """A connection for each of the requests that arrive together."""

    def __init__(self, kernel: Kernel) -> None:
        fast_path = FastPath(HttpInference(kernel, 1 << 26, forwards=False))
        self._transports = [_Transport() for _ in range(TOGETHER)]
        self._connections = [FastConnection(fast_path) for _ in range(TOGETHER)]
        for connection, transport in zip(self._connections, self._transports, strict=True):
            connection.connection_made(transport)  # type: ignore[arg-type]  # what it uses of a transport
        header = _json_header()
        body = header + _TENSOR * 2
        head = (
            "POST /v2/models/add_sub/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
            f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body

    def prepared(self) -> Callable[[], None]:
        def receive() -> None:
            for connection in self._connections:
                connection.data_received(self._request)

        return receive

    def check(self, rounds: int) -> None:
        assert all(transport.written > rounds * len(_TENSOR) * 2 for transport in self._transports)


def _json_header() -> bytes:
    inputs = ",".join(
        f'{{"name":"{name}","datatype":"FP32","shape":[16],"parameters":{{"binary_data_size":{len(_TENSOR)}}}}}'
        for name in _NAMES
    )
    return f'{{"inputs":[{inputs}],"parameters":{{"binary_data_output":true}}}}'.encode()


class _GrpcDoor:
    """One connection with all calls, in the frames that clients of gRPC core send. It is their `CallAcceptor`."""

    def __init__(self, kernel: Kernel) -> None:
        self._inference = Inference(kernel, OpenCalls())
        self._transport = _Transport()
        self._connection = ServerConnection(self)
        self._connection.connection_made(self._transport)  # type: ignore[arg-type]  # what it uses of a transport
        _receive(self._connection, frames.PREFACE + frames.settings([]))
        self._hpack = Encoder()
        self._number = 1
        message = pb.ModelInferRequest(model_name="add_sub", raw_input_contents=[_TENSOR] * 2)
        for name in _NAMES:
            message.inputs.add(name=name, datatype="FP32", shape=[16])
        self._message = PREFIX.pack(0, message.ByteSize()) + message.SerializeToString()

    def prepared(self) -> Callable[[], None]:
        octets = b"".join(self._call() for _ in range(TOGETHER))
        return lambda: _receive(self._connection, octets)

    def _call(self) -> bytes:
        block = self._hpack.encode(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", "/inference.GRPCInferenceService/ModelInfer"),
                (":authority", "localhost:8001"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "bench"),
            ]
        )
        number, self._number = self._number, self._number + 2
        return (
            frames.frame_header(len(block), frames.HEADERS, frames.END_HEADERS, number)
            + block
            + frames.window_update(number, PREFIX.size)
            + frames.frame_header(len(self._message), frames.DATA, frames.END_STREAM, number)
            + self._message
            + frames.window_update(0, len(self._message))
        )

    def check(self, rounds: int) -> None:
        assert self._transport.written > rounds * TOGETHER * len(_TENSOR) * 2

    def connection_opened(self, connection: Any) -> None:
        """Do nothing: there is one connection."""

    def connection_closed(self, connection: Any) -> None:
        """Do nothing: the connection is never closed."""

    def accept_call(self, connection: Any, stream: Any) -> Any:
        return InferCall(self._inference, connection, stream)

    def connection_idle(self) -> None:
        """Do nothing: nothing waits for the end of all calls."""


def _receive(connection: asyncio.BufferedProtocol, octets: bytes) -> None:
    while octets:
        buffer = memoryview(connection.get_buffer(-1))
        taken = min(len(buffer), len(octets))
        buffer[:taken] = octets[:taken]
        connection.buffer_updated(taken)
        octets = octets[taken:]
