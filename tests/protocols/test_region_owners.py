"""With --shared-memory-owner=peer a region is its client's alone, over both protocols and on every path."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kernel.options import HttpOptions
from kernel.serving.response import Response
from kernel.testing import model_spec
from protocols import access
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.server import GrpcServer
from protocols.http.server import HttpServer
from protocols.large_requests import LOOP_BYTE_SIZE
from tests.protocols.front_door_lab import FrontDoorLab, listening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.serving.request import Request

UNKNOWN = "Unable to find shared memory region: 'r'"

#: A parameter that makes a request so large that a helper decodes it: over gRPC by its size, over HTTP by the time that
#: its escaped characters take.
LARGE_TEXT, SLOW_TEXT = "x" * (LOOP_BYTE_SIZE + 1), "\n" * 100_000

SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture
def key() -> Iterator[str]:
    path = Path("/dev/shm", f"naiad_test_{uuid.uuid4().hex}")
    path.write_bytes(bytes(64))
    yield f"/{path.name}"
    path.unlink()


@pytest.fixture(autouse=True)
def each_connection_is_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "peer_identity", lambda transport: f"port {transport.get_extra_info('peername')[1]}")


class HttpClient:
    """A client with one connection."""

    def __init__(self, port: int, *, large: bool = False) -> None:
        """The requests of a `large` client are decoded by helpers."""
        self._parameters = {"text": SLOW_TEXT} if large else {}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def _call(self, method: str, path: str, body: object = None) -> Any:
        self._connection.request(method, path, None if body is None else json.dumps(body))
        return json.loads(self._connection.getresponse().read() or "null")

    def register(self, key: str) -> None:
        body = {"key": key, "offset": 0, "byte_size": 64}
        assert self._call("POST", "/v2/systemsharedmemory/region/r/register", body) is None

    def unregister(self, name: str) -> None:
        place = f"/region/{name}" if name else ""
        assert self._call("POST", f"/v2/systemsharedmemory{place}/unregister") is None

    def names(self) -> list[str]:
        return [region["name"] for region in self._call("GET", "/v2/systemsharedmemory/status")]

    def infer(self) -> str:
        """Return the error, empty for none."""
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "parameters": place}
        request = {"inputs": [tensor], "parameters": self._parameters}
        error: str = self._call("POST", "/v2/models/m/infer", request).get("error", "")
        return error

    def close(self) -> None:
        self._connection.close()


class GrpcClient:
    """A client with one connection."""

    def __init__(self, port: int, *, large: bool = False) -> None:
        """The requests of a `large` client are decoded by helpers."""
        self._large = large
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])

    def _call(self, name: str, message: Any, response_type: Any) -> Any:
        call = self._channel.unary_unary(
            SERVICE + name, lambda sent: sent.SerializeToString(), response_type.FromString
        )
        return call(message, timeout=30)

    def register(self, key: str) -> None:
        message = pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=64)
        self._call("SystemSharedMemoryRegister", message, pb.SystemSharedMemoryRegisterResponse)

    def unregister(self, name: str) -> None:
        message = pb.SystemSharedMemoryUnregisterRequest(name=name)
        self._call("SystemSharedMemoryUnregister", message, pb.SystemSharedMemoryUnregisterResponse)

    def names(self) -> list[str]:
        message = pb.SystemSharedMemoryStatusRequest()
        return list(self._call("SystemSharedMemoryStatus", message, pb.SystemSharedMemoryStatusResponse).regions)

    def _request(self) -> pb.ModelInferRequest:
        tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1])
        tensor.parameters["shared_memory_region"].string_param = "r"
        tensor.parameters["shared_memory_byte_size"].int64_param = 4
        request = pb.ModelInferRequest(model_name="m", inputs=[tensor])
        if self._large:
            request.parameters["text"].string_param = LARGE_TEXT
        return request

    def infer(self) -> str:
        """Return the error, empty for none."""
        try:
            self._call("ModelInfer", self._request(), pb.ModelInferResponse)
        except grpc.RpcError as error:
            return str(error.details())
        return ""

    def close(self) -> None:
        self._channel.close()


class StreamingClient(GrpcClient):
    """The same, with inference over a stream."""

    def infer(self) -> str:
        call = self._channel.stream_stream(
            f"{SERVICE}ModelStreamInfer", lambda sent: sent.SerializeToString(), pb.ModelStreamInferResponse.FromString
        )
        [response] = call(iter([self._request()]), timeout=30)
        return str(response.error_message)


def respond(request: Request) -> None:
    request.respond(Response("m", "1", request.id, outputs=[]))


#: How many requests `conversation` sends.
REQUEST_COUNT = 6


def conversation(make: Callable[[], Any], key: str) -> None:
    with contextlib.closing(make()) as owner, contextlib.closing(make()) as other:
        owner.register(key)
        assert [owner.infer(), owner.infer()] == ["", ""], "the second time from what was prepared"
        assert UNKNOWN in other.infer()
        assert (owner.names(), other.names()) == (["r"], [])
        other.unregister("r")
        other.unregister("")
        assert owner.infer() == ""
        other.register(key)
        assert other.infer() == ""
        owner.unregister("")
        assert UNKNOWN in owner.infer()
        assert (owner.names(), other.names()) == ([], ["r"])


def run(lab: FrontDoorLab, make_door: Any, make_client: Callable[[int], Any], key: str) -> None:
    async def main() -> None:
        lab.add_model(model_spec("m", dims=(-1,)), respond)
        async with listening(make_door) as port:
            await asyncio.to_thread(conversation, lambda: make_client(port), key)
        lab.regions.close()

    asyncio.run(main())


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("fast_path", [True, False])
def test_a_region_is_its_clients_alone_over_http(key: str, fast_path: bool, large: bool) -> None:
    lab = FrontDoorLab(regions_are_owned=True)
    make_client = functools.partial(HttpClient, large=large)
    run(lab, lambda sock: HttpServer(lab.kernel, sock, HttpOptions(), fast_path=fast_path), make_client, key)
    assert len(lab.helpers.started) == (REQUEST_COUNT if large else 0)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("client", [GrpcClient, StreamingClient])
def test_a_region_is_its_clients_alone_over_grpc(key: str, client: type[GrpcClient], large: bool) -> None:
    lab = FrontDoorLab(regions_are_owned=True)
    run(lab, lambda sock: GrpcServer(lab.kernel, sock), functools.partial(client, large=large), key)
    assert len(lab.helpers.started) == (REQUEST_COUNT if large else 0)


def test_by_default_all_clients_share_regions(key: str) -> None:
    lab = FrontDoorLab()

    async def main() -> None:
        lab.add_model(model_spec("m", dims=(-1,)), respond)
        async with listening(lambda sock: HttpServer(lab.kernel, sock, HttpOptions())) as port:
            await asyncio.to_thread(share, port)
        lab.regions.close()

    def share(port: int) -> None:
        with contextlib.closing(HttpClient(port)) as first, contextlib.closing(HttpClient(port)) as second:
            first.register(key)
            assert (second.infer(), second.names()) == ("", ["r"])
            second.unregister("r")
            assert first.names() == []

    asyncio.run(main())
