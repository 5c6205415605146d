"""What no client library of gRPC sends, over a socket: h2 as the client of a running server."""

import socket
import threading

import grpc
import pytest

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.serving.request import Request
from kernel.serving.response import Response
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.h2 import frames
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab
from tests.protocols.grpc.wire_calls import ask, fields, message, run

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
READY = "/inference.GRPCInferenceService/ServerReady"


def echo(request: Request) -> None:
    tensor = request.inputs[0]
    outputs = [Tensor("X", tensor.datatype, tensor.shape, data=bytes(tensor.data or b""))]
    request.respond(Response(request.model_name, "1", request.id, outputs=outputs))


@pytest.fixture
def lab() -> FrontDoorLab:
    lab = FrontDoorLab()
    tensor = TensorSpec("X", "UINT8", (-1,), (-1,))
    lab.add_model(ModelSpec("echo", "", "test", 0, {"X": tensor}, {"X": tensor}), echo)
    return lab


def infer(raw: bytes = b"abc") -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="UINT8", shape=[len(raw)])
    return pb.ModelInferRequest(model_name="echo", inputs=[tensor], raw_input_contents=[raw]).SerializeToString()


def test_a_well_formed_call_gets_the_status_ok(lab: FrontDoorLab) -> None:
    assert ask(lab, fields(INFER), message(infer()))["grpc-status"] == "0"


@pytest.mark.parametrize("path", [INFER, READY, STREAM_INFER])
@pytest.mark.parametrize(
    ("content", "encoding", "status"),
    [
        (message(infer())[:-1], "identity", grpc.StatusCode.INTERNAL),
        (b"\0\0", "identity", grpc.StatusCode.INTERNAL),
        (b"\0\xff\xff\xff\xff", "identity", grpc.StatusCode.RESOURCE_EXHAUSTED),
        (message(infer(), 7), "gzip", grpc.StatusCode.INTERNAL),
        (message(infer(), 1), "identity", grpc.StatusCode.INTERNAL),
        (message(b"no gzip", 1), "gzip", grpc.StatusCode.INTERNAL),
        (message(b"\xff\xff"), "identity", grpc.StatusCode.INTERNAL),
    ],
)
def test_a_faulty_message_has_the_status_of_its_fault(
    lab: FrontDoorLab, path: str, content: bytes, encoding: str, status: grpc.StatusCode
) -> None:
    assert ask(lab, fields(path, grpc_encoding=encoding), content)["grpc-status"] == str(status.value[0])


def test_an_unknown_encoding_is_refused_with_those_that_are_known(lab: FrontDoorLab) -> None:
    response = ask(lab, fields(INFER, grpc_encoding="snappy"), message(infer(), 1))
    assert response["grpc-status"] == str(grpc.StatusCode.UNIMPLEMENTED.value[0])
    assert response["grpc-accept-encoding"] == "identity,deflate,gzip"


def test_a_call_without_a_message_is_unimplemented(lab: FrontDoorLab) -> None:
    assert ask(lab, fields(INFER), None)["grpc-status"] == str(grpc.StatusCode.UNIMPLEMENTED.value[0])


def test_two_messages_in_a_unary_call_are_a_fault(lab: FrontDoorLab) -> None:
    response = ask(lab, fields(INFER), message(infer()) * 2, end=False)
    assert response["grpc-status"] == str(grpc.StatusCode.INTERNAL.value[0])
    assert response["reset"] == str(int(frames.H2ErrorCode.NO_ERROR))


@pytest.mark.parametrize("timeout", ["x", "123456789S"])
def test_an_invalid_timeout_is_refused(lab: FrontDoorLab, timeout: str) -> None:
    response = ask(lab, fields(INFER, grpc_timeout=timeout), message(infer()))
    assert response["grpc-message"] == "Invalid grpc-timeout header"


def test_a_deadline_also_ends_a_call_whose_message_does_not_arrive(lab: FrontDoorLab) -> None:
    response = ask(lab, fields(INFER, grpc_timeout="10m"), message(infer())[:-1], end=False)
    assert response["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
    assert response["grpc-message"] == "Deadline Exceeded"


@pytest.mark.parametrize(("change", "status"), [({"content_type": "text/html"}, "415"), ({"te": ""}, None)])
def test_requests_that_are_not_grpc_are_refused(lab: FrontDoorLab, change: dict[str, str], status: str | None) -> None:
    headers = [field for field in fields(INFER, **change) if field[1]]
    assert ask(lab, headers, message(infer()))[":status"] == (status or "400")


@pytest.mark.parametrize("octets", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"])
def test_clients_of_other_protocols_get_goaway(lab: FrontDoorLab, octets: bytes) -> None:
    def conversation(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(octets)
            received = b""
            while part := sock.recv(2**16):
                received += part
            return received

    assert run(lab, conversation).endswith(b"this port speaks HTTP/2")


def test_a_flood_is_ended_while_others_are_served(lab: FrontDoorLab) -> None:
    ended = threading.Event()

    def flood(port: int) -> None:
        pings = (frames.frame_header(8, frames.PING, 0, 0) + bytes(8)) * 20_000
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            try:
                sock.sendall(frames.PREFACE + frames.settings([]) + pings)
                while sock.recv(2**16):
                    pass
            except ConnectionError:
                pass  # it was cut off while it was still sending
        ended.set()

    def conversation(port: int) -> bytes:
        attacker = threading.Thread(target=flood, args=(port,))
        attacker.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(INFER, response_deserializer=pb.ModelInferResponse.FromString)
            for _ in range(20):
                response = call(infer(), timeout=60)
        attacker.join(60)
        assert ended.is_set()
        return bytes(response.raw_output_contents[0])

    assert run(lab, conversation) == b"abc"
