"""Reflection as its clients use it: grpcio-reflection for v1alpha, messages of our own for v1."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool

from kernel.config.pool import POOL
from protocols.grpc.generated import reflection_v1_pb2 as v1
from protocols.grpc.generated import reflection_v1alpha_pb2 as v1alpha
from protocols.grpc.rpcs.reflection import SERVICES, response_to
from protocols.testing import FrontDoorLab

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
        first, second = call(iter(requests), timeout=20)
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
            list(call(iter([message[:-1]]), timeout=20))
        return error.value

    error = talk(FrontDoorLab(), conversation)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "the message is no ServerReflectionRequest: it is cut short or damaged"
    assert not caplog.records
