"""What each option of the gRPC door changes on the wire: restrictions, forwarding, compression, TLS, keepalive, age.

One file for the options of one door: its tests share the models and the stubs below.
"""

import asyncio
import contextlib
import gzip
import queue
import socket
import ssl
import zlib
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
import tritonclient.grpc as triton

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import BadOption
from kernel.options import GrpcOptions, TlsOptions
from kernel.serving.request import Request
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.h2 import frames
from protocols.grpc.h2.transport import ServerConnection
from protocols.grpc.server import GrpcServer
from shm.region import RegionKind
from tests.protocols.certificates import Certificates
from tests.protocols.front_door_lab import FrontDoorLab
from tests.protocols.grpc.echo import echo

Talk = Callable[..., Any]

SERVICE = "/inference.GRPCInferenceService"
X = TensorSpec("X", "UINT8", (-1,), (-1,))


@pytest.fixture
def lab() -> FrontDoorLab:
    lab = FrontDoorLab()
    for name, decoupled in (("echo", False), ("many", True)):
        lab.add_model(ModelSpec(name, "", "test", 0, {"X": X}, {"X": X}, decoupled), echo)
    return lab


def infer(raw: bytes = b"abc", model: str = "echo") -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="UINT8", shape=[len(raw)])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw])


def model_infer(channel: grpc.Channel) -> Any:
    return channel.unary_unary(
        f"{SERVICE}/ModelInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelInferResponse.FromString,
    )


def stream_infer(channel: grpc.Channel) -> Any:
    return channel.stream_stream(
        f"{SERVICE}/ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )


def failure(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


# ---- restrictions ---------------------------------------------------------------------------

RESTRICTED = GrpcOptions(restricted_protocol=("inference:key=secret",))
REFUSED = (
    grpc.StatusCode.UNAVAILABLE,
    "This protocol is restricted, expecting header 'triton-grpc-protocol-key'",
)
HEADER = (("triton-grpc-protocol-key", "secret"),)


def test_restricted_inference_needs_the_header_unary_and_on_streams(talk: Talk, lab: FrontDoorLab) -> None:
    def conversation(channel: grpc.Channel) -> None:
        for _ in range(2):  # headers are remembered
            assert failure(lambda: model_infer(channel)(infer(), timeout=60)) == REFUSED
            assert model_infer(channel)(infer(), metadata=HEADER, timeout=60).raw_output_contents == [b"abc"]
        assert failure(lambda: list(stream_infer(channel)(iter([infer()]), timeout=60))) == REFUSED
        (response,) = stream_infer(channel)(iter([infer()]), metadata=HEADER, timeout=60)
        assert response.infer_response.raw_output_contents == [b"abc"]
        channel.unary_unary(f"{SERVICE}/ServerReady")(b"", timeout=60)

    talk(lab, conversation, RESTRICTED)


def test_a_stream_that_is_refused_ends_though_its_client_goes_on(talk: Talk, lab: FrontDoorLab) -> None:
    def conversation(channel: grpc.Channel) -> None:
        requests: queue.SimpleQueue[pb.ModelInferRequest] = queue.SimpleQueue()
        call = stream_infer(channel)(iter(requests.get, None), timeout=60)
        assert failure(lambda: next(call)) == REFUSED
        requests.put(None)  # type: ignore[arg-type]

    talk(lab, conversation, RESTRICTED)


@pytest.mark.parametrize("text", ["inference", "nothing:a=b", "inference:a"])
def test_an_invalid_restriction_is_an_error_at_start(lab: FrontDoorLab, text: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(BadOption):
            GrpcServer(lab.kernel, sock, GrpcOptions(restricted_protocol=(text,)))


# ---- forwarding -----------------------------------------------------------------------------

FORWARDING = GrpcOptions(header_forward_pattern="^(x-|time)")
RESERVED = "Header 'timeout' is reserved for Triton usage and cannot be forwarded."


def test_metadata_becomes_parameters_of_every_request(talk: Talk, lab: FrontDoorLab) -> None:
    def conversation(channel: grpc.Channel) -> None:
        for value in ("1", "2", "2", "1"):
            metadata = (("x-one", value), ("y", "3"))
            response = model_infer(channel)(infer(), metadata=metadata, timeout=60)
            assert dict(response.parameters) == {"x-one": pb.InferParameter(string_param=value)}
            for response in stream_infer(channel)(iter([infer(), infer()]), metadata=metadata, timeout=60):
                assert response.infer_response.parameters["x-one"].string_param == value
        assert not model_infer(channel)(infer(), timeout=60).parameters

    talk(lab, conversation, FORWARDING)


def test_a_reserved_name_is_an_error_of_the_request(talk: Talk, lab: FrontDoorLab) -> None:
    def conversation(channel: grpc.Channel) -> None:
        metadata = (("timeout", "1"),)
        refused = failure(lambda: model_infer(channel)(infer(), metadata=metadata, timeout=60))
        assert refused == (grpc.StatusCode.INVALID_ARGUMENT, RESERVED)
        responses = stream_infer(channel)(iter([infer(), infer()]), metadata=metadata, timeout=60)
        assert [response.error_message for response in responses] == [RESERVED] * 2

    talk(lab, conversation, FORWARDING)


def test_a_refused_name_leaves_no_region_in_use(talk: Talk, lab: FrontDoorLab) -> None:
    block = SharedMemory(create=True, size=64)
    try:
        lab.regions.register_system("r", f"/{block.name.lstrip('/')}", 0, 64)
        [region] = lab.regions.status(RegionKind.SYSTEM)
        message = pb.ModelInferRequest(model_name="echo")
        parameters = message.inputs.add(name="X", datatype="UINT8", shape=[3]).parameters
        parameters["shared_memory_region"].string_param = "r"
        parameters["shared_memory_byte_size"].int64_param = 3

        def conversation(channel: grpc.Channel) -> None:
            metadata = (("timeout", "1"),)
            for known in (False, True):
                refused = failure(lambda: model_infer(channel)(message, metadata=metadata, timeout=60))
                assert refused == (grpc.StatusCode.INVALID_ARGUMENT, RESERVED), known
                list(stream_infer(channel)(iter([message]), metadata=metadata, timeout=60))
                assert region.lease_count == 0
                if not known:
                    response = model_infer(channel)(message, timeout=60)  # it is prepared now
                    assert response.raw_output_contents == [bytes(3)]

        talk(lab, conversation, FORWARDING)
        assert region.lease_count == 0
    finally:
        block.close()
        block.unlink()


# ---- compression ----------------------------------------------------------------------------


def response_on_the_wire(port: int, path: str, message: bytes, accepted: str) -> tuple[dict[str, str], bytes]:
    """Return the headers and the messages, with their prefixes, of the response to a call."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    client.initiate_connection()
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a", "te": "trailers"}
    headers |= {"content-type": "application/grpc", "grpc-accept-encoding": accepted}
    client.send_headers(1, list(headers.items()))
    client.send_data(1, bytes(1) + len(message).to_bytes(4, "big") + message, end_stream=True)
    headers_and_trailers: dict[str, str] = {}
    messages = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(client.data_to_send())
        while octets := sock.recv(2**16):
            for event in client.receive_data(octets):
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    headers_and_trailers |= {str(name): str(value) for name, value in event.headers or ()}
                elif isinstance(event, h2.events.DataReceived):
                    messages += event.data or b""
                    client.acknowledge_received_data(event.flow_controlled_length or 0, 1)
                elif isinstance(event, h2.events.StreamEnded):
                    return headers_and_trailers, messages
            sock.sendall(client.data_to_send())
    raise ConnectionError


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize(
    ("level", "accepted", "encoding"),
    [
        ("low", "identity,deflate,gzip", "gzip"),
        ("medium", "identity,deflate,gzip", "deflate"),
        ("high", "identity,gzip", "gzip"),
        ("high", "identity", None),
        ("none", "identity,deflate,gzip", None),
    ],
)
def test_responses_of_inference_are_compressed_as_the_level_says_and_the_client_accepts(
    talk: Talk, lab: FrontDoorLab, method: str, level: str, accepted: str, encoding: str | None
) -> None:
    def conversation(port: int) -> None:
        message = infer(b"a" * 1000).SerializeToString()
        headers_and_trailers, messages = response_on_the_wire(port, f"{SERVICE}/{method}", message, accepted)
        assert headers_and_trailers.get("grpc-encoding") == encoding
        assert headers_and_trailers["grpc-status"] == "0"
        flag, content = messages[0], messages[5:]
        assert int.from_bytes(messages[1:5], "big") == len(content)
        assert flag == (encoding is not None)
        if encoding is not None:
            content = gzip.decompress(content) if encoding == "gzip" else zlib.decompress(content)
        assert b"a" * 1000 in content

    talk(lab, conversation, GrpcOptions(infer_response_compression_level=level), by_port=True)


@pytest.mark.parametrize("byte_size", [10, 100_000])
def test_compressed_responses_are_understood(talk: Talk, lab: FrontDoorLab, byte_size: int) -> None:
    raw = b"a" * byte_size

    def conversation(channel: grpc.Channel) -> None:
        for _ in range(3):
            assert model_infer(channel)(infer(raw), timeout=60).raw_output_contents == [raw]
        responses = stream_infer(channel)(iter([infer(raw), infer(raw, "many")]), timeout=60)
        assert [list(response.infer_response.raw_output_contents) for response in responses] == [[raw]] * 2

    talk(lab, conversation, GrpcOptions(infer_response_compression_level="high"))


# ---- TLS ------------------------------------------------------------------------------------


def secure_channel(port: int, certificates: Certificates, *, with_certificate: bool = False) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(
        certificates.authority.read_bytes(),
        certificates.client_key.read_bytes() if with_certificate else None,
        certificates.client.read_bytes() if with_certificate else None,
    )
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials)


@pytest.mark.parametrize("uv", [True, False])
def test_calls_travel_over_tls(talk: Talk, lab: FrontDoorLab, certificates: Certificates, uv: bool) -> None:
    raw = bytes(range(256)) * 2**13  # 2 MiB: more than the socket takes at once

    def conversation(port: int) -> None:
        with secure_channel(port, certificates) as channel:
            for _ in range(3):
                assert model_infer(channel)(infer(), timeout=60).raw_output_contents == [b"abc"]
            assert model_infer(channel)(infer(raw), timeout=60).raw_output_contents[0] == raw
            (response,) = stream_infer(channel)(iter([infer(raw)]), timeout=60)
            assert response.infer_response.raw_output_contents[0] == raw

    lab = FrontDoorLab(arena_byte_size=2**24)
    lab.add_model(ModelSpec("echo", "", "test", 0, {"X": X}, {"X": X}), echo)
    talk(lab, conversation, GrpcOptions(tls=certificates.options()), by_port=True, uv=uv)


def test_a_client_without_tls_is_refused(talk: Talk, lab: FrontDoorLab, certificates: Certificates) -> None:
    def conversation(channel: grpc.Channel) -> None:
        status, _ = failure(lambda: model_infer(channel)(infer(), timeout=60))
        assert status is grpc.StatusCode.UNAVAILABLE

    talk(lab, conversation, GrpcOptions(tls=certificates.options()))


def test_mutual_tls_asks_for_a_certificate(talk: Talk, lab: FrontDoorLab, certificates: Certificates) -> None:
    def conversation(port: int) -> None:
        with secure_channel(port, certificates) as channel:
            status, _ = failure(lambda: model_infer(channel)(infer(), timeout=60))
            assert status is grpc.StatusCode.UNAVAILABLE
        with secure_channel(port, certificates, with_certificate=True) as channel:
            assert model_infer(channel)(infer(), timeout=60).raw_output_contents == [b"abc"]

    talk(lab, conversation, GrpcOptions(tls=certificates.options(mutual=True)), by_port=True)


def test_the_ssl_options_of_tritonclient_are_understood(
    talk: Talk, lab: FrontDoorLab, certificates: Certificates
) -> None:
    def conversation(port: int) -> None:
        with triton.InferenceServerClient(
            f"localhost:{port}",
            ssl=True,
            root_certificates=str(certificates.authority),
            private_key=str(certificates.client_key),
            certificate_chain=str(certificates.client),
        ) as client:
            assert client.is_server_ready()

    talk(lab, conversation, GrpcOptions(tls=certificates.options(mutual=True)), by_port=True)


def test_clients_of_other_protocols_get_goaway_over_tls(
    talk: Talk, lab: FrontDoorLab, certificates: Certificates
) -> None:
    def conversation(port: int) -> bytes:
        context = ssl.create_default_context(cafile=str(certificates.authority))
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as sock,
            context.wrap_socket(sock, server_hostname="localhost") as secured,
        ):
            secured.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            received = b""
            with contextlib.suppress(OSError):
                while part := secured.recv(2**16):
                    received += part
            return received

    received = talk(lab, conversation, GrpcOptions(tls=certificates.options()), by_port=True)
    assert received.endswith(b"this port speaks HTTP/2")


def test_a_missing_certificate_is_an_error_at_start(lab: FrontDoorLab, tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(BadOption):
            GrpcServer(lab.kernel, sock, GrpcOptions(tls=TlsOptions(tmp_path / "no", tmp_path / "no")))


# ---- keepalive and age ----------------------------------------------------------------------


def test_a_client_that_pings_too_often_loses_its_connection(talk: Talk, lab: FrontDoorLab) -> None:
    def conversation(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(frames.PREFACE + frames.settings([]) + frames.PING_REQUEST * 4)
            received = b""
            while part := sock.recv(2**16):
                received += part
            return received

    assert talk(lab, conversation, by_port=True).endswith(
        frames.goaway(0, frames.H2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
    )


def test_a_client_that_keeps_to_the_agreed_interval_may_ping(talk: Talk, lab: FrontDoorLab) -> None:
    """The client of grpcio pings every 10 ms; with an interval of none the server lets it."""
    options = GrpcOptions(
        keepalive_permit_without_calls=True, http2_min_recv_ping_interval_without_data_ms=0, keepalive_time_ms=10
    )
    channel_options = (
        ("grpc.keepalive_time_ms", 10),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )

    def conversation(channel: grpc.Channel) -> None:
        for _ in range(3):
            assert model_infer(channel)(infer(), timeout=60).raw_output_contents == [b"abc"]

    talk(lab, conversation, options, channel_options=channel_options)


def read_until(sock: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received and (part := sock.recv(2**16)):
        received += part
    return received


def test_a_client_that_sends_nothing_is_pinged_and_its_connection_closed(talk: Talk, lab: FrontDoorLab) -> None:
    options = GrpcOptions(keepalive_time_ms=10, keepalive_timeout_ms=10, keepalive_permit_without_calls=True)

    def conversation(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(frames.PREFACE + frames.settings([]))
            assert frames.PING_REQUEST in read_until(sock, frames.PING_REQUEST)
            with contextlib.suppress(ConnectionError):
                while sock.recv(2**16):
                    pass

    talk(lab, conversation, options, by_port=True)


def test_a_client_of_grpcio_acknowledges_pings_and_keeps_its_call(talk: Talk, lab: FrontDoorLab) -> None:
    """The held call gets its response after the client has acknowledged several pings of the server."""
    options = GrpcOptions(
        keepalive_time_ms=5, keepalive_timeout_ms=5000, keepalive_permit_without_calls=True,
        http2_max_pings_without_data=0,
    )  # fmt: skip

    def respond_later(request: Request) -> None:
        asyncio.get_running_loop().call_later(0.1, echo, request)

    lab.add_model(ModelSpec("later", "", "test", 0, {"X": X}, {"X": X}), respond_later)

    def conversation(channel: grpc.Channel) -> None:
        assert model_infer(channel)(infer(model="later"), timeout=60).raw_output_contents == [b"abc"]

    talk(lab, conversation, options)


def test_clients_move_to_new_connections_when_theirs_gets_too_old(
    talk: Talk, lab: FrontDoorLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call fails while connections of 20 ms end under it."""
    opened: list[ServerConnection] = []
    connection_made = ServerConnection.connection_made

    def noted(self: ServerConnection, transport: asyncio.BaseTransport) -> None:
        opened.append(self)
        connection_made(self, transport)

    monkeypatch.setattr(ServerConnection, "connection_made", noted)

    def conversation(channel: grpc.Channel) -> None:
        for _ in range(20_000):
            assert model_infer(channel)(infer(), timeout=60).raw_output_contents == [b"abc"]
            if len(opened) >= 3:
                return
        raise AssertionError("the connection did not end")

    talk(lab, conversation, GrpcOptions(max_connection_age_ms=20, max_connection_age_grace_ms=5000))


def test_calls_of_an_old_connection_end_with_their_grace_period(talk: Talk, lab: FrontDoorLab) -> None:
    held: list[Request] = []
    instance = lab.add_model(ModelSpec("slow", "", "test", 0, {"X": X}, {"X": X}), held.append)

    def conversation(channel: grpc.Channel) -> None:
        status, _ = failure(lambda: model_infer(channel)(infer(model="slow"), timeout=60))
        assert status is grpc.StatusCode.UNAVAILABLE

    talk(lab, conversation, GrpcOptions(max_connection_age_ms=20, max_connection_age_grace_ms=20))
    assert instance.cancelled == held
