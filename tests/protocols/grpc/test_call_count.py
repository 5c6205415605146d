"""How few calls of Python a warm small request takes from its bytes to the kernel, and its response to the socket.

A call costs little in a loop and much in a server, whose processors do not keep the code and the objects of a hundred
functions in their caches (bench/README.md). The limits here are what was reached: a change that needs more calls
shows up here before it shows up in a measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hpack import Encoder

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.serving.response import Response
from protocols.grpc.framing import PREFIX
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.h2 import frames
from protocols.grpc.h2.limits import KeepaliveRules
from protocols.grpc.h2.transport import ServerConnection
from protocols.grpc.handlers import Handlers
from protocols.grpc.rpc import OpenCalls
from protocols.grpc.rpcs.infer import Inference
from protocols.grpc.server import GrpcListener, ListenerOptions
from protocols.grpc.service import MODEL_INFER
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab
from tests.protocols.grpc.h2.client_frames import CLIENT_PREFACE, FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.serving.request import Request

#: From the transport's question for a buffer up to and including `Kernel.submit`; clients of gRPC core send a
#: WINDOW_UPDATE more.
MAX_CALLS_TO_SUBMIT = {"HEADERS and DATA": 14, "as gRPC core sends it": 15}

#: From `send` of the request's sink to `write` of the transport, and what follows it.
MAX_CALLS_TO_WRITE = 11

#: Frames on the stack from `buffer_updated` up to and including the caller of `Kernel.submit`.
MAX_DEPTH_AT_SUBMIT = 3

PACKAGES = tuple(str(Path(__file__).parents[3] / name) for name in ("protocols", "kernel"))

HOUR_NS = 3600 * 10**9
RULES = KeepaliveRules(
    time_ns=HOUR_NS,
    timeout_ns=HOUR_NS,
    permit_without_calls=True,
    max_pings_without_data=0,
    min_recv_ping_interval_ns=0,
    max_ping_strikes=0,
    max_age_ns=None,
    max_age_grace_ns=None,
)


class Sink(asyncio.Transport):
    """A transport that writes everything at once."""

    written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class Recorder:
    """A profiler that notes the calls of our functions, and the stack when the kernel gets a request."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.calls_to_submit = 0
        self.stack: list[str] = []

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGES):
            return
        self.calls.append(frame.f_code.co_qualname)
        if frame.f_code.co_name == "submit" and not self.calls_to_submit:
            self.calls_to_submit = len(self.calls)
            caller = frame.f_back
            while caller.f_code.co_filename.startswith(PACKAGES):
                self.stack.insert(0, caller.f_code.co_qualname)
                caller = caller.f_back


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    before = sys.getprofile()
    gc.disable()  # finalizers are calls, too, and belong to something else
    sys.setprofile(recorder)
    try:
        yield recorder
    finally:
        sys.setprofile(before)
        gc.enable()


class Lab:
    """A connection of the gRPC front door to a kernel that keeps what it is given."""

    def __init__(self) -> None:
        lab = FrontDoorLab()
        self.requests: list[Request] = []
        tensor = TensorSpec("X", "FP32", (16,), (16,))
        lab.add_model(ModelSpec("m", "", "test", 0, {"X": tensor}, {"X": tensor}), self.requests.append)
        calls = OpenCalls()
        options = ListenerOptions(None, RULES, None)
        listener = GrpcListener(None, options, Inference(lab.kernel, calls), Handlers({}))
        self.transport = Sink()
        self.connection = ServerConnection(listener)
        self.connection.connection_made(self.transport)
        self.receive(CLIENT_PREFACE)
        self._encoder = Encoder()
        self._next_id = 1
        message = pb.ModelInferRequest(model_name="m", raw_input_contents=[struct.pack("<16f", *range(16))])
        message.inputs.add(name="X", datatype="FP32", shape=[16])
        self._message = PREFIX.pack(0, message.ByteSize()) + message.SerializeToString()

    def call(self, *, as_grpc_core: bool) -> bytes:
        """Return the frames of one call."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        block = self._encoder.encode([(name, MODEL_INFER if name == ":path" else value) for name, value in FIELDS])
        update = frames.window_update(stream_id, PREFIX.size) if as_grpc_core else b""
        return (
            frames.frame_header(len(block), frames.HEADERS, frames.END_HEADERS, stream_id)
            + block
            + update
            + frames.frame_header(len(self._message), frames.DATA, frames.END_STREAM, stream_id)
            + self._message
        )

    def receive(self, octets: bytes) -> None:
        buffer = self.connection.get_buffer(-1)
        buffer[: len(octets)] = octets
        self.connection.buffer_updated(len(octets))

    def response(self) -> Response:
        request = self.requests[-1]
        outputs = [Tensor("X", "FP32", [16], data=bytes(64))]
        return Response("m", "1", request.id, outputs=outputs)


async def warm_lab(*, as_grpc_core: bool) -> Lab:
    """Return a lab whose client has made the same call before."""
    lab = Lab()
    for _ in range(3):
        lab.receive(lab.call(as_grpc_core=as_grpc_core))
        lab.requests[-1].respond(lab.response())
        await asyncio.sleep(0)
    assert len(lab.requests) == 3
    return lab


@pytest.mark.parametrize("as_grpc_core", [False, True])
def test_a_warm_small_request_reaches_the_kernel_in_few_calls(as_grpc_core: bool) -> None:
    async def main() -> Recorder:
        lab = await warm_lab(as_grpc_core=as_grpc_core)
        octets = lab.call(as_grpc_core=as_grpc_core)
        with recording() as recorder:
            lab.receive(octets)
        assert len(lab.requests) == 4
        return recorder

    recorder = asyncio.run(main())
    limit = MAX_CALLS_TO_SUBMIT["as gRPC core sends it" if as_grpc_core else "HEADERS and DATA"]
    to_submit = recorder.calls[: recorder.calls_to_submit]
    assert 0 < len(to_submit) <= limit, to_submit
    assert recorder.stack[0] == "ServerConnection.buffer_updated"
    assert len(recorder.stack) <= MAX_DEPTH_AT_SUBMIT, recorder.stack


def test_a_warm_small_response_is_written_in_few_calls() -> None:
    async def main() -> Recorder:
        lab = await warm_lab(as_grpc_core=True)
        lab.receive(lab.call(as_grpc_core=True))
        response, before = lab.response(), len(lab.transport.written)
        with recording() as recorder:
            lab.requests[-1].sink.send(response)
            await asyncio.sleep(0)
        assert len(lab.transport.written) > before
        return recorder

    recorder = asyncio.run(main())
    assert len(recorder.calls) <= MAX_CALLS_TO_WRITE, recorder.calls
