"""Reflection as its clients use it: grpcio-reflection for v1alpha, messages of our own for v1."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool

from kernel.config.pool import POOL
from protocols.grpc.generated import reflection_v1_pb2 as v1
from protocols.grpc.generated import reflection_v1alpha_pb2 as v1alpha
from protocols.grpc.generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from protocols.grpc.rpc import Caller, OpenCalls
from protocols.grpc.rpcs.standard_services import SERVICES, HealthService, WatchCall, response_to
from protocols.grpc.server import GrpcServer
from tests.own_records import own_records
from tests.protocols.front_door_lab import FrontDoorLab, listening

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING

SERVICE_UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN


class FakeStream:
    """The server's side of a Watch call; `after_send` is called for every status that was sent."""

    def __init__(self, after_send: Callable[[], None], service: str) -> None:
        self.sent: list[int] = []
        self._after_send = after_send
        self._service = service

    async def recv_message(self) -> HealthCheckRequest:
        return HealthCheckRequest(service=self._service)

    async def send_message(self, message: HealthCheckResponse) -> None:
        self.sent.append(message.status)
        self._after_send()


def watch(lab: FrontDoorLab, after_send: Callable[[WatchCall, FakeStream], None], service: str = "") -> list[int]:
    """Watch until the call ends; returns the statuses that were sent."""

    async def main() -> list[int]:
        stream = FakeStream(lambda: after_send(call, stream), service)
        call = WatchCall(lab.kernel, cast("Any", stream), interval_s=0.001)
        await call.run()
        return stream.sent

    return asyncio.run(main())


def test_a_status_is_sent_at_once_and_when_it_has_changed() -> None:
    lab = FrontDoorLab()

    def after_send(call: WatchCall, stream: FakeStream) -> None:
        if len(stream.sent) == 3:
            call.stop()
        else:
            lab.catalog.set_broken("m", "no configuration" if len(stream.sent) == 1 else None)

    assert watch(lab, after_send) == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]


def test_a_server_that_exits_is_not_serving_and_ends_the_watch() -> None:
    lab = FrontDoorLab()
    lab.kernel.stopping = True
    assert watch(lab, lambda call, stream: call.stop()) == [NOT_SERVING]


@pytest.mark.parametrize("service", ["inference.GRPCInferenceService", "grpc.health.v1.Health"])
def test_services_of_the_server_are_as_healthy_as_the_server(service: str) -> None:
    assert watch(FrontDoorLab(), lambda call, stream: call.stop(), service) == [SERVING, NOT_SERVING]


def test_a_service_that_is_not_there_is_unknown_until_the_server_stops() -> None:
    assert watch(FrontDoorLab(), lambda call, stream: call.stop(), "nothing") == [SERVICE_UNKNOWN]


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService", "nothing"])
def test_check_speaks_for_the_whole_server_whatever_service_is_named(service: str) -> None:
    lab = FrontDoorLab()
    message = HealthCheckRequest(service=service)
    assert asyncio.run(HealthService(lab.kernel, OpenCalls()).check(message, Caller(None))).status == SERVING


def test_a_watch_on_the_wire_sees_the_server_stop() -> None:
    lab = FrontDoorLab()
    first, last = threading.Event(), threading.Event()
    statuses: list[int] = []

    def conversation(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )
            for response in call(HealthCheckRequest(), timeout=60):
                statuses.append(response.status)
                first.set()
        last.set()

    async def main() -> None:
        async with listening(lambda sock: GrpcServer(lab.kernel, sock)) as port:
            client = asyncio.ensure_future(asyncio.to_thread(conversation, port))
            await asyncio.to_thread(first.wait, 20)
        await client

    asyncio.run(main())
    assert last.is_set()
    assert statuses == [SERVING, NOT_SERVING]


Talk = Callable[..., Any]


def ask(**fields: Any) -> Any:
    return response_to(v1.ServerReflectionRequest(host="h", **fields), v1.ServerReflectionResponse, POOL)


def test_a_response_names_its_request() -> None:
    response = ask(list_services="*")
    assert response.valid_host == "h"
    assert response.original_request.list_services == "*"


@pytest.mark.parametrize(
    "symbol",
    [
        "inference.GRPCInferenceService",
        "inference.GRPCInferenceService.ModelInfer",
        "inference.ModelInferRequest",
        "inference.ModelInferRequest.InferInputTensor",
    ],
)
def test_the_file_of_a_symbol_is_sent_with_all_that_it_imports(symbol: str) -> None:
    pool = DescriptorPool()
    for file in ask(file_containing_symbol=symbol).file_descriptor_response.file_descriptor_proto:
        pool.AddSerializedFile(file)
    assert "ModelStreamInfer" in pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name


def test_a_file_is_found_by_its_name() -> None:
    response = ask(file_by_filename="protocols/grpc/health.proto")
    assert len(response.file_descriptor_response.file_descriptor_proto) == 1


def test_messages_have_no_extensions() -> None:
    response = ask(all_extension_numbers_of_type="inference.ModelInferRequest").all_extension_numbers_response
    assert response.base_type_name == "inference.ModelInferRequest"
    assert list(response.extension_number) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"file_by_filename": "nothing.proto"},
        {"file_containing_symbol": "inference.Nothing"},
        {"file_containing_symbol": "inference.GRPCInferenceService.Nothing"},
        {"file_containing_symbol": ""},
        {"all_extension_numbers_of_type": "inference.Nothing"},
        {"file_containing_extension": v1.ExtensionRequest(containing_type="inference.Nothing", extension_number=1)},
        {
            "file_containing_extension": v1.ExtensionRequest(
                containing_type="inference.ModelInferRequest", extension_number=1
            )
        },
    ],
)
def test_names_that_do_not_exist_are_not_found(fields: dict[str, Any]) -> None:
    assert ask(**fields).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_a_request_for_nothing_is_an_error() -> None:
    assert ask().error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


@pytest.mark.parametrize(("name", "messages"), [("v1", v1), ("v1alpha", v1alpha)])
def test_both_versions_are_served(talk: Talk, name: str, messages: Any) -> None:
    def conversation(channel: grpc.Channel) -> list[str]:
        call = channel.stream_stream(
            f"/grpc.reflection.{name}.ServerReflection/ServerReflectionInfo",
            request_serializer=messages.ServerReflectionRequest.SerializeToString,
            response_deserializer=messages.ServerReflectionResponse.FromString,
        )
        requests = [messages.ServerReflectionRequest(list_services="*")] * 2
        first, second = call(iter(requests), timeout=60)
        assert first == second
        return [service.name for service in first.list_services_response.service]

    assert talk(FrontDoorLab(), conversation) == list(SERVICES)


def test_the_client_of_grpcio_finds_our_messages(talk: Talk) -> None:
    database = pytest.importorskip("grpc_reflection.v1alpha.proto_reflection_descriptor_database")

    def conversation(channel: grpc.Channel) -> list[str]:
        found = database.ProtoReflectionDescriptorDatabase(channel)
        assert set(found.get_services()) == set(SERVICES)
        message = DescriptorPool(found).FindMessageTypeByName("inference.ModelConfigResponse")
        return [field.message_type.full_name for field in message.fields if field.message_type is not None]

    assert talk(FrontDoorLab(), conversation) == ["inference.ModelConfig"]


def test_a_message_that_is_cut_short_is_an_invalid_argument_and_logs_nothing(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    def conversation(channel: grpc.Channel) -> grpc.RpcError:
        call = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        message = v1.ServerReflectionRequest(file_containing_symbol="inference").SerializeToString()
        with pytest.raises(grpc.RpcError) as error:
            list(call(iter([message[:-1]]), timeout=60))
        return error.value

    error = talk(FrontDoorLab(), conversation)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "the message is no ServerReflectionRequest: it is cut short or damaged"
    assert not own_records(caplog)
