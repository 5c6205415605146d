"""Unary calls, health, statuses and the stop of the server over a socket, with grpcio as the client."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.message import Message

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import ErrorCode, error_of, worker_error
from kernel.serving.request import Request
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from protocols.grpc.server import GrpcServer
from tests.protocols.front_door_lab import FrontDoorLab, listening
from tests.protocols.grpc.echo import echo

MEBIBYTE = 2**20


def spec(name: str, *, decoupled: bool = False) -> ModelSpec:
    tensor = TensorSpec("X", "UINT8", (-1,), (-1,))
    return ModelSpec(name, "", "test", 0, {"X": tensor}, {"X": tensor}, decoupled)


def infer(model: str, raw: bytes = b"", **more: Any) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="UINT8", shape=[len(raw)])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw], **more)


def unary(channel: grpc.Channel, name: str, response_type: type[Message]) -> Any:
    path = name if name.startswith("/") else f"/inference.GRPCInferenceService/{name}"
    return channel.unary_unary(
        path, request_serializer=lambda m: m.SerializeToString(), response_deserializer=response_type.FromString
    )


def model_infer(channel: grpc.Channel) -> Any:
    return unary(channel, "ModelInfer", pb.ModelInferResponse)


def talk(lab: FrontDoorLab, conversation: Callable[[grpc.Channel], Any]) -> Any:
    """Run `conversation` in a thread with a channel to a server over `lab`; returns what it returns."""

    def with_channel(port: int) -> Any:
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
            return conversation(channel)

    async def main() -> Any:
        async with listening(lambda sock: GrpcServer(lab.kernel, sock)) as port:
            return await asyncio.to_thread(with_channel, port)

    return asyncio.run(main())


def failure(lab: FrontDoorLab, conversation: Callable[[grpc.Channel], Any]) -> tuple[grpc.StatusCode, str]:
    """Return status and text of a conversation that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        talk(lab, conversation)
    return caught.value.code(), caught.value.details()


@pytest.fixture
def lab() -> FrontDoorLab:
    lab = FrontDoorLab(arena_byte_size=64 * MEBIBYTE)
    lab.add_model(spec("echo"), echo)
    return lab


def test_a_response_has_the_data_and_parameters_of_its_request(lab: FrontDoorLab) -> None:
    parameters = {"key": pb.InferParameter(string_param="value")}
    response = talk(lab, lambda channel: model_infer(channel)(infer("echo", b"abc", id="7", parameters=parameters)))
    assert response == pb.ModelInferResponse(
        model_name="echo",
        model_version="1",
        id="7",
        parameters=parameters,
        outputs=[pb.ModelInferResponse.InferOutputTensor(name="X", datatype="UINT8", shape=[3])],
        raw_output_contents=[b"abc"],
    )


def test_a_tensor_of_16_mebibytes_passes_in_both_directions(lab: FrontDoorLab) -> None:
    raw = bytes(range(256)) * (MEBIBYTE // 16)
    # Compared in the thread: the result of `asyncio.run` is printed by Python's own signal module.
    assert talk(lab, lambda channel: model_infer(channel)(infer("echo", raw)).raw_output_contents[0] == raw)


def test_the_client_library_of_triton_is_understood(lab: FrontDoorLab) -> None:
    def conversation(port: int) -> tuple[bool, list[int], Any]:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            tensor = triton.InferInput("X", [3], "UINT8")
            tensor.set_data_from_numpy(np.array([1, 2, 3], np.uint8))
            result = client.infer("echo", [tensor], request_id="1")
            metadata = client.get_model_metadata("echo", as_json=True)
            return client.is_server_ready(), result.as_numpy("X").tolist(), metadata["inputs"]

    async def main() -> tuple[bool, list[int], Any]:
        async with listening(lambda sock: GrpcServer(lab.kernel, sock)) as port:
            return await asyncio.to_thread(conversation, port)

    ready, values, inputs = asyncio.run(main())
    assert ready
    assert values == [1, 2, 3]
    assert inputs == [{"name": "X", "datatype": "UINT8", "shape": ["-1"]}]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.UNKNOWN, grpc.StatusCode.UNKNOWN),
        (ErrorCode.INTERNAL, grpc.StatusCode.INTERNAL),
        (ErrorCode.NOT_FOUND, grpc.StatusCode.NOT_FOUND),
        (ErrorCode.INVALID_ARG, grpc.StatusCode.INVALID_ARGUMENT),
        (ErrorCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (ErrorCode.UNSUPPORTED, grpc.StatusCode.UNIMPLEMENTED),
        (ErrorCode.ALREADY_EXISTS, grpc.StatusCode.ALREADY_EXISTS),
    ],
)
def test_errors_have_the_status_of_their_code_and_their_text_as_it_is(
    lab: FrontDoorLab, code: ErrorCode, status: grpc.StatusCode
) -> None:
    text = "line one\nline 'two'\t\"quoted\" 100% é 😀 "
    lab.add_model(spec("fail"), lambda request: request.fail(error_of(code, text)))
    assert failure(lab, lambda channel: model_infer(channel)(infer("fail"))) == (status, text)


def test_a_long_error_still_reaches_the_client(lab: FrontDoorLab) -> None:
    text = "Traceback:\n" * 10_000
    lab.add_model(spec("fail"), lambda request: request.fail(worker_error(ErrorCode.INTERNAL, text)))
    status, received = failure(lab, lambda channel: model_infer(channel)(infer("fail")))
    assert status is grpc.StatusCode.INTERNAL
    assert len(received) > 1000
    assert text.startswith(received)


def test_a_decoupled_model_is_refused(lab: FrontDoorLab) -> None:
    lab.add_model(spec("many", decoupled=True), echo)
    assert failure(lab, lambda channel: model_infer(channel)(infer("many"))) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


def test_bytes_that_are_not_a_message_are_refused(lab: FrontDoorLab) -> None:
    def conversation(channel: grpc.Channel) -> None:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\xff\xff")

    assert failure(lab, conversation) == (grpc.StatusCode.INTERNAL, "Unable to parse request")


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_message_is_understood(lab: FrontDoorLab, compression: grpc.Compression) -> None:
    raw = b"a" * 1000

    def conversation(channel: grpc.Channel) -> Any:
        return model_infer(channel)(infer("echo", raw), compression=compression)

    assert talk(lab, conversation).raw_output_contents == [raw]


def test_a_method_that_does_not_exist_is_unimplemented(lab: FrontDoorLab) -> None:
    status, _ = failure(lab, lambda channel: unary(channel, "Nothing", pb.ModelInferResponse)(infer("echo")))
    assert status is grpc.StatusCode.UNIMPLEMENTED


def test_a_client_that_cancels_its_call_cancels_the_request(lab: FrontDoorLab) -> None:
    held: list[Request] = []
    arrived = threading.Event()

    def hold(request: Request) -> None:
        held.append(request)
        arrived.set()

    instance = lab.add_model(spec("slow"), hold)

    def cancel_call(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = model_infer(channel).future(infer("slow"), timeout=60)
            arrived.wait()
            call.cancel()

    async def main() -> None:
        async with listening(lambda sock: GrpcServer(lab.kernel, sock)) as port:
            await asyncio.to_thread(cancel_call, port)
            await lab.kernel.resolve("slow").drain()

    asyncio.run(main())
    assert instance.cancelled == held


def test_a_deadline_that_has_passed_is_the_status(lab: FrontDoorLab) -> None:
    lab.add_model(spec("slow"), lambda request: None)
    status, _ = failure(lab, lambda channel: model_infer(channel)(infer("slow"), timeout=0.01))
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED


def test_health_says_whether_the_server_is_ready(lab: FrontDoorLab) -> None:
    def conversation(channel: grpc.Channel) -> Any:
        return unary(channel, "/grpc.health.v1.Health/Check", HealthCheckResponse)(HealthCheckRequest())

    assert talk(lab, conversation).status == HealthCheckResponse.SERVING
    lab.catalog.set_broken("broken", "no configuration")
    assert talk(lab, conversation).status == HealthCheckResponse.NOT_SERVING
    lab.kernel.stopping = True
    assert failure(lab, conversation) == (grpc.StatusCode.UNAVAILABLE, "Server exiting")


# ---- the stop of the server -----------------------------------------------------------------


def stop_while_running(lab: FrontDoorLab, grace_s: float) -> Any:
    """Stop a server while a call to the model `slow` runs; returns how the call ended."""
    started = threading.Event()
    held: list[Request] = []

    def hold(request: Request) -> None:
        held.append(request)
        started.set()

    lab.add_model(spec("slow"), hold)

    def call_slow(port: int) -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                return model_infer(channel)(infer("slow", b"x"), timeout=60)
            except grpc.RpcError as error:
                return error

    async def main() -> Any:
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
        server = GrpcServer(lab.kernel, sock)
        await server.start()
        client = asyncio.ensure_future(asyncio.to_thread(call_slow, sock.getsockname()[1]))
        await asyncio.to_thread(started.wait)
        stopping = asyncio.ensure_future(server.stop(grace_s))
        await asyncio.sleep(0)  # the stop has begun
        if grace_s:
            echo(held[0])
        await stopping
        return await client

    return asyncio.run(main())


def test_a_call_that_runs_when_the_server_stops_gets_its_response(lab: FrontDoorLab) -> None:
    response = stop_while_running(lab, grace_s=20)
    assert response.raw_output_contents == [b"x"]


def test_a_call_that_does_not_end_in_time_gets_a_status(lab: FrontDoorLab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    error = stop_while_running(lab, grace_s=0)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "Server exiting: the call took too long"
    assert "gRPC calls that did not end within 0 s are cancelled" in caplog.text


def test_the_title_names_the_address() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert GrpcServer(FrontDoorLab().kernel, sock).title == f"GRPCInferenceService at 127.0.0.1:{port}"
