"""Our .proto files against the messages that `tritonclient` ships: every name, number and type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import descriptor_pb2

from kernel.config.generated import model_config_pb2
from protocols.grpc.generated import grpc_service_pb2, health_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
ENUM = descriptor_pb2.FieldDescriptorProto.TYPE_ENUM
OPTIONAL = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL


def described(file: Any) -> dict[str, Any]:
    """Return what matters on the wire, for text and for JSON, of everything in a .proto file."""
    parsed = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(parsed)
    found: dict[str, Any] = {"package": parsed.package, "syntax": parsed.syntax}
    found |= described_messages(parsed.package, parsed.message_type)
    found |= {f"enum {enum.name}": described_enum(enum) for enum in parsed.enum_type}
    for service in parsed.service:
        for method in service.method:
            found[f"rpc {service.name}.{method.name}"] = (
                method.input_type,
                method.client_streaming,
                method.output_type,
                method.server_streaming,
            )
    return found


def described_messages(prefix: str, messages: Iterable[descriptor_pb2.DescriptorProto]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for message in messages:
        name = f"{prefix}.{message.name}"
        # A list: the order of the fields is that of the JSON of /config.
        found[name] = {"fields": [described_field(message, field) for field in message.field]}
        found[name] |= {f"enum {enum.name}": described_enum(enum) for enum in message.enum_type}
        found |= described_messages(name, message.nested_type)
    return found


def described_field(
    message: descriptor_pb2.DescriptorProto, field: descriptor_pb2.FieldDescriptorProto
) -> tuple[object, ...]:
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return field.name, field.json_name, field.number, field.type, field.type_name, field.label, oneof


def described_enum(enum: descriptor_pb2.EnumDescriptorProto) -> dict[str, int]:
    return {value.name: value.number for value in enum.value}


def test_the_model_configuration_equals_that_of_the_client_library() -> None:
    theirs = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    assert described(model_config_pb2.DESCRIPTOR) == described(theirs.DESCRIPTOR)


def test_the_inference_service_equals_that_of_the_client_library() -> None:
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2")
    assert described(grpc_service_pb2.DESCRIPTOR) == described(theirs.DESCRIPTOR)


def test_the_health_service_has_the_standard_names_and_numbers() -> None:
    found = described(health_pb2.DESCRIPTOR)
    assert found["package"] == "grpc.health.v1"
    assert found["rpc Health.Check"] == (
        ".grpc.health.v1.HealthCheckRequest",
        False,
        ".grpc.health.v1.HealthCheckResponse",
        False,
    )
    assert found["grpc.health.v1.HealthCheckRequest"]["fields"] == [("service", "", 1, STRING, "", OPTIONAL, "")]
    response = found["grpc.health.v1.HealthCheckResponse"]
    assert response["fields"] == [
        ("status", "", 1, ENUM, ".grpc.health.v1.HealthCheckResponse.ServingStatus", OPTIONAL, "")
    ]
    assert response["enum ServingStatus"] == {
        "UNKNOWN": 0,
        "SERVING": 1,
        "NOT_SERVING": 2,
        "SERVICE_UNKNOWN": 3,
    }


def test_messages_of_server_and_client_can_be_used_in_one_process() -> None:
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2")
    ours = grpc_service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"\x01\x02"])
    parsed = theirs.ModelInferRequest.FromString(ours.SerializeToString())
    assert parsed.model_name == "m"
    assert list(parsed.raw_input_contents) == [b"\x01\x02"]


def test_the_configuration_in_a_response_is_the_one_that_was_parsed() -> None:
    config = model_config_pb2.ModelConfig(name="m")
    response = grpc_service_pb2.ModelConfigResponse(config=config)
    assert response.config == config
