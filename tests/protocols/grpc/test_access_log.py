"""The access log of the gRPC front door: a line for each call, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.options import GrpcOptions
from kernel.serving.response import Response
from protocols.grpc.access_log import names_in_request, status_name
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.h2.headers import OK_TRAILERS, encode_trailers, status_trailers
from protocols.grpc.server import GrpcServer
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab, listening

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.request import Request

_SERVICE = "/inference.GRPCInferenceService"


def spec(name: str) -> ModelSpec:
    tensor = TensorSpec("X", "UINT8", (-1,), (-1,))
    return ModelSpec(name, "", "test", 0, {"X": tensor}, {"X": tensor}, False)


def echo(request: Request) -> None:
    outputs = [Tensor("X", "UINT8", [1], data=b"x")]
    request.respond(Response(request.model_name, "1", request.id, outputs=outputs))


def infer(model: str, **more: Any) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="UINT8", shape=[1])
    return pb.ModelInferRequest(
        model_name=model, inputs=[tensor], raw_input_contents=[b"a"], **more
    ).SerializeToString()


def calls(conversation: Callable[[grpc.Channel], None], caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """Return the lines of the access log, without what differs from run to run."""
    lab = FrontDoorLab()
    lab.add_model(spec("echo"), echo)
    lab.add_model(spec("stuck"), lambda request: stuck.set())

    def with_channel(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            conversation(channel)

    async def main() -> None:
        options_given = GrpcOptions(**options)
        async with listening(lambda sock: GrpcServer(lab.kernel, sock, options_given, log_access=True)) as port:
            await asyncio.to_thread(with_channel, port)

    stuck.clear()
    with caplog.at_level(logging.INFO, "access"):
        asyncio.run(main())
    found = [record.getMessage() for record in caplog.records if record.name == "access"]
    assert all(re.match(r"127\.0\.0\.1:\d+ gRPC /", line) for line in found)
    return [re.sub(r" ms=[0-9.]+", "", line.partition(" gRPC ")[2]).removeprefix(_SERVICE) for line in found]


#: Set when the model "stuck", which never responds, has received a request.
stuck = threading.Event()


def call(channel: grpc.Channel, name: str, message: bytes) -> None:
    """Make a unary call whose failure is expected or not."""
    path = name if name.startswith("/") else f"{_SERVICE}/{name}"
    with contextlib.suppress(grpc.RpcError):
        channel.unary_unary(path)(message)


def test_every_call_gets_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def conversation(channel: grpc.Channel) -> None:
        call(channel, "ModelInfer", infer("echo", id="an id", model_version="1"))
        call(channel, "ModelInfer", infer("none"))
        call(channel, "ServerLive", b"")
        call(channel, "ModelMetadata", pb.ModelMetadataRequest(name="none").SerializeToString())
        call(channel, "/no.Such/Call", b"")
        requests = iter([infer("echo"), infer("none")])
        list(channel.stream_stream(f"{_SERVICE}/ModelStreamInfer")(requests))

    found = calls(conversation, caplog)
    assert [re.sub(r" in=\d+ out=\d+", "", line) for line in found] == [
        "/ModelInfer OK model=echo version=1 id=an id",
        "/ModelInfer NOT_FOUND model=none",
        "/ServerLive OK",
        "/ModelMetadata NOT_FOUND",
        "/no.Such/Call UNIMPLEMENTED",
        "/ModelStreamInfer OK",
    ]
    sizes = [[int(size) for size in re.findall(r"=(\d+)", line)[:2]] for line in found]
    assert all(received >= 5 for received, _ in sizes)
    assert [sent > 5 for _, sent in sizes] == [True, False, True, False, False, True]


def test_a_refused_call_gets_a_line(caplog: pytest.LogCaptureFixture) -> None:
    found = calls(lambda channel: call(channel, "ServerLive", b""), caplog, restricted_protocol=("health:key=secret",))
    assert [line.split()[:2] for line in found] == [["/ServerLive", "UNAVAILABLE"]]


def test_compressed_responses_are_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    found = calls(
        lambda channel: call(channel, "ModelInfer", infer("echo")), caplog, infer_response_compression_level="high"
    )
    assert [line.split()[1] for line in found] == ["OK"]


def test_a_client_that_does_not_wait_gets_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def conversation(channel: grpc.Channel) -> None:
        waiting = channel.unary_unary(f"{_SERVICE}/ModelInfer").future(infer("stuck", id="7"))
        assert stuck.wait(60)
        waiting.cancel()

    found = calls(conversation, caplog)
    assert [re.sub(r" in=\d+ out=0", "", line) for line in found] == ["/ModelInfer CANCELLED model=stuck id=7"]


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (infer("m", model_version="2", id="3"), ("m", "2", "3")),
        (infer("m" * 1000), ("m" * 1000, "", "")),
        (b"", ("", "", "")),
        (b"\x0a", ("", "", "")),
        (b"\x0a\xff\xff\xff\xff\xff", ("", "", "")),
        (b"\x0a\x7fshort", ("short", "", "")),
        (b"\x0a\x01\xff\x1a\x01i\x2a\x01x", ("\ufffd", "", "i")),
    ],
)
def test_the_names_in_a_request_are_read_from_its_first_bytes(message: bytes, found: tuple[str, str, str]) -> None:
    assert names_in_request(message) == found


def test_a_status_has_its_name_in_grpc_or_that_of_http() -> None:
    assert status_name(OK_TRAILERS) == "OK"
    assert status_name(status_trailers(14, "no")) == "UNAVAILABLE"
    assert status_name(status_trailers(99, None)) == "99"
    assert status_name(encode_trailers([(":status", "415")])) == "HTTP(415)"
