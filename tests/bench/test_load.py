"""The load client: small loads on a real server; responses are complete with their last byte, errors do not count."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import hpack
import pytest

from bench.load import (
    CLIENT_PREFACE,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    SETTINGS,
    WINDOW_UPDATE,
    BadResponse,
    GrpcLoadClient,
    HttpLoadClient,
    LoadNotRun,
    Spec,
    frame,
    run_apart,
)
from bench.models import copy_name, instances_name, write_growing_models
from bench.server import ServerProcess
from protocols.grpc.generated import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    models: Path = tmp_path_factory.mktemp("models")
    write_growing_models(models, 2, (2,))
    with ServerProcess(models) as running:
        yield running


def spec(server: ServerProcess, protocol: str, models: list[str]) -> Spec:
    port = server.http_port if protocol == "http" else server.grpc_port
    return Spec(protocol, port, 3, models, 0.5, server.pid)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_all_connections_are_kept_busy(server: ServerProcess, protocol: str) -> None:
    models = [copy_name(0), copy_name(1), instances_name("add_sub", 2), instances_name("waiting", 2)]
    sample = run_apart(spec(server, protocol, models))
    assert sample.requests > 0
    assert 0 < sample.p50_us <= sample.p99_us


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_error_of_the_server_ends_the_load(server: ServerProcess, protocol: str) -> None:
    with pytest.raises(LoadNotRun, match="unknown model"):
        run_apart(spec(server, protocol, ["missing"]))


def test_a_server_that_is_not_there_ends_the_load(server: ServerProcess) -> None:
    with pytest.raises(LoadNotRun, match="refused"):
        run_apart(Spec("http", 1, 1, ["m"], 0.05, server.pid))


HTTP_RESPONSE = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 3\r\nContent-Length: 5\r\n\r\nabcde"


@pytest.mark.parametrize("cut", range(len(HTTP_RESPONSE)))
def test_an_http_response_is_complete_with_its_last_byte(cut: int) -> None:
    client = HttpLoadClient()
    assert not client.feed(HTTP_RESPONSE[:cut])
    assert client.feed(HTTP_RESPONSE[cut:])
    assert client.feed(HTTP_RESPONSE)


def test_an_http_error_is_not_counted() -> None:
    with pytest.raises(BadResponse, match="no such model"):
        HttpLoadClient().feed(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 13\r\n\r\nno such model")


def test_an_http_request_names_its_model_and_lengths() -> None:
    head, _, body = HttpLoadClient().request("m").partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v2/models/m/infer HTTP/1.1\r\n")
    assert f"\r\nContent-Length: {len(body)}".encode() in head
    json_size = int(head.partition(b"Inference-Header-Content-Length: ")[2].partition(b"\r\n")[0])
    assert len(body) - json_size == 128


def grpc_response(status: str = "0", message: str = "") -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    head = encoder.encode([(":status", "200"), ("content-type", "application/grpc")])
    trailers = encoder.encode([("grpc-status", status), ("grpc-message", message)])
    return (
        frame(HEADERS, END_HEADERS, 1, head)
        + frame(DATA, 0, 1, b"\0\0\0\0\0")
        + frame(HEADERS, END_HEADERS | END_STREAM, 1, trailers)
    )


def test_a_grpc_response_is_complete_with_its_trailers_however_it_is_cut() -> None:
    response = grpc_response()
    for cut in range(len(response)):
        client = GrpcLoadClient()
        assert not client.feed(response[:cut])
        assert client.feed(response[cut:])


def test_a_grpc_error_is_not_counted() -> None:
    with pytest.raises(BadResponse, match="14 it is gone"):
        GrpcLoadClient().feed(grpc_response("14", "it is gone"))


def test_a_goaway_ends_the_load() -> None:
    with pytest.raises(BadResponse, match="type 7"):
        GrpcLoadClient().feed(frame(GOAWAY, 0, 0, bytes(8)))


def test_a_grpc_connection_begins_with_the_preface_and_acknowledges() -> None:
    client = GrpcLoadClient()
    assert client.pending.startswith(CLIENT_PREFACE)
    client.pending.clear()
    client.feed(frame(SETTINGS, 0, 0, b"") + frame(PING, 0, 0, b"12345678") + frame(SETTINGS, 1, 0, b""))
    assert client.pending == frame(SETTINGS, 1, 0, b"") + frame(PING, 1, 0, b"12345678")


def grpc_message(model: str) -> bytes:
    request = GrpcLoadClient().request(model)
    headers = int.from_bytes(request[:3])
    return request[9 + headers + 9 :]


def test_grpc_requests_use_new_streams_and_the_connection_window() -> None:
    client = GrpcLoadClient()
    requests = [client.request("m") for _ in range(65535 // len(grpc_message("m")))]
    assert [struct.unpack_from(">I", request, 5)[0] for request in requests[:3]] == [1, 3, 5]
    with pytest.raises(BadResponse, match="window"):
        client.request("m")
    client.feed(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 65535)))
    assert client.request("m")


def test_a_grpc_request_is_one_message() -> None:
    message = pb.ModelInferRequest.FromString(grpc_message("m")[5:])
    assert message.model_name == "m"
    assert [len(raw) for raw in message.raw_input_contents] == [64, 64]
