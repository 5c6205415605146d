"""A connection whose client does not read its responses is not read either: the end of such a client is noticed."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
import uvloop

from kernel.config.spec import ModelSpec, TensorSpec
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.h2 import frames
from protocols.grpc.h2.frames import Setting
from protocols.grpc.h2.headers import encode_block
from protocols.grpc.server import GrpcServer
from protocols.grpc.service import MODEL_INFER
from tests.protocols.front_door_lab import FrontDoorLab, listening
from tests.protocols.grpc.echo import echo
from tests.protocols.grpc.wire_calls import fields, message

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocols.grpc.h2.transport import ServerConnection

BLOCK = encode_block(fields(MODEL_INFER))
BYTE_SIZE = 16_000


def call(number: int, model: str, byte_size: int) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="UINT8", shape=[byte_size])
    request = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[bytes(byte_size)])
    content = message(request.SerializeToString())
    begin = frames.headers(number, BLOCK, max_byte_size=2**14, end_stream=False)
    return begin + frames.frame_header(len(content), frames.DATA, frames.END_STREAM, number) + content


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_calls_of_a_client_that_has_gone_are_cancelled(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    lab = FrontDoorLab(arena_byte_size=1 << 26)
    tensor = TensorSpec("X", "UINT8", (-1,), (-1,))
    for name, respond in (("echo", echo), ("held", lambda request: None)):
        lab.add_model(ModelSpec(name, "", "test", 0, {"X": tensor}, {"X": tensor}), respond)
    held = lab.kernel.resolve("held")
    windows = frames.settings([(Setting.INITIAL_WINDOW_SIZE, 2**30)]) + frames.window_update(0, 2**30)
    sent = frames.PREFACE + windows + call(1, "held", 4)
    sent += b"".join(call(number, "echo", BYTE_SIZE) for number in range(3, 1603, 2))

    async def main() -> None:
        servers: list[GrpcServer] = []

        def make(sock: socket.socket) -> GrpcServer:
            servers.append(GrpcServer(lab.kernel, sock))
            return servers[0]

        async with listening(make) as port:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(sock.connect, ("127.0.0.1", port))
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            sending = asyncio.ensure_future(loop.sock_sendall(sock, sent))  # which ends only if all of it is read
            await until(lambda: [is_paused(each) for each in connections(servers[0])] == [True])
            assert held.root_count == 1
            sending.cancel()
            await asyncio.wait([sending])
            sock.close()
            await until(lambda: not held.root_count)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert held.statistics.failures["CANCELED"] == 1


def connections(server: GrpcServer) -> set[ServerConnection]:
    assert server._listener is not None
    return server._listener._connections


def is_paused(connection: ServerConnection) -> bool:
    return connection._read_paused and connection._write_paused


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)
