"""Calls that are refused before their messages are looked at: by their size, their client, their content type."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kernel.config.spec import ModelSpec
from kernel.options import AdminOptions
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.server import GrpcServer
from protocols.grpc.service import ADMINISTERS, CATEGORIES, MODEL_INFER, MODEL_LOAD, MODEL_STREAM_INFER
from protocols.request_limits import MAX_CONTROL_BYTE_SIZE
from tests.protocols.front_door_lab import FrontDoorLab
from tests.protocols.grpc.wire_calls import ask, fields

if TYPE_CHECKING:
    from collections.abc import Callable

    Talk = Callable[..., Any]

CONTROL = sorted(set(CATEGORIES) - {MODEL_INFER, MODEL_STREAM_INFER, MODEL_LOAD})
SERVICE = "/inference.GRPCInferenceService"
ADMIN_KEY = ("triton-grpc-protocol-admin-key", "secret")


@pytest.fixture
def lab() -> FrontDoorLab:
    lab = FrontDoorLab()
    lab.add_model(ModelSpec("m", "", "test", 0, {}, {}), lambda request: None)
    return lab


def outcome(
    channel: grpc.Channel, path: str, message: bytes, metadata: tuple[tuple[str, str], ...] = ()
) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call with one message, and its text."""
    call = channel.stream_stream(path)(iter([message]), metadata=metadata, timeout=60)
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return call.code(), call.details()


@pytest.mark.parametrize("path", CONTROL)
def test_a_large_message_is_refused_where_there_are_no_tensors_and_files(
    lab: FrontDoorLab, talk: Talk, path: str
) -> None:
    for size in (MAX_CONTROL_BYTE_SIZE + 1, 5_000_000):
        message = bytes(size)
        found = talk(lab, lambda channel, message=message: outcome(channel, path, message))
        text = f"Received message larger than max ({size} vs. {MAX_CONTROL_BYTE_SIZE})"
        assert found == (grpc.StatusCode.RESOURCE_EXHAUSTED, text)


def test_a_load_may_bring_large_files(lab: FrontDoorLab, talk: Talk) -> None:
    message = pb.RepositoryModelLoadRequest(model_name="m")
    message.parameters["config"].string_param = "{}"
    message.parameters["file:1/m"].bytes_param = bytes(300_000)
    found = talk(lab, lambda channel: outcome(channel, MODEL_LOAD, message.SerializeToString()))
    assert found[0] is grpc.StatusCode.OK
    assert [name for verb, name, _ in lab.repository.calls] == ["m"]


LONG = "x" * 60_000
TENSOR = pb.ModelInferRequest.InferInputTensor


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (MODEL_INFER, pb.ModelInferRequest(model_name=LONG)),
        (MODEL_INFER, pb.ModelInferRequest(model_name="m", model_version=LONG)),
        (MODEL_INFER, pb.ModelInferRequest(model_name="m", id=LONG, inputs=[TENSOR(name="X", datatype=LONG)])),
        (MODEL_INFER, pb.ModelInferRequest(model_name="m", inputs=[TENSOR(name=LONG, datatype="FP32")])),
        (f"{SERVICE}/ModelMetadata", pb.ModelMetadataRequest(name=LONG)),
        (f"{SERVICE}/ModelStatistics", pb.ModelStatisticsRequest(name=LONG)),
        (f"{SERVICE}/SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key=LONG)),
        (f"{SERVICE}/SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=LONG)),
        (f"{SERVICE}/TraceSetting", pb.TraceSettingRequest(model_name=LONG)),
        (f"{SERVICE}/LogSettings", pb.LogSettingsRequest(
            settings={"log_format": pb.LogSettingsRequest.SettingValue(string_param=LONG)})),
    ],
)  # fmt: skip
def test_an_error_repeats_little_of_a_long_text(lab: FrontDoorLab, talk: Talk, path: str, message: Any) -> None:
    code, text = talk(lab, lambda channel: outcome(channel, path, message.SerializeToString()))
    assert code is not grpc.StatusCode.OK
    assert 0 < len(text.encode()) < 1100


def test_an_error_of_a_stream_repeats_little_of_a_long_text(lab: FrontDoorLab, talk: Talk) -> None:
    def conversation(channel: grpc.Channel) -> str:
        call = channel.stream_stream(MODEL_STREAM_INFER, response_deserializer=pb.ModelStreamInferResponse.FromString)(
            iter([pb.ModelInferRequest(model_name=LONG).SerializeToString()]), timeout=60
        )
        return str(next(iter(call)).error_message)

    assert 0 < len(talk(lab, conversation).encode()) < 1100


# ---- --admin-access --------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[AdminOptions], None]:
    """Return a function after whose call servers of `talk` have these options."""

    def serve(admin: AdminOptions) -> None:
        plain = GrpcServer.__init__

        def init(self: GrpcServer, *given: Any, **more: Any) -> None:
            plain(self, *given, **more, admin=admin)

        monkeypatch.setattr(GrpcServer, "__init__", init)

    return serve


WRITES = {
    **dict.fromkeys(sorted(ADMINISTERS), b""),
    f"{SERVICE}/TraceSetting": pb.TraceSettingRequest(
        settings={"trace_rate": pb.TraceSettingRequest.SettingValue(value=["7"])}
    ).SerializeToString(),
    f"{SERVICE}/LogSettings": pb.LogSettingsRequest(
        settings={"log_verbose_level": pb.LogSettingsRequest.SettingValue(uint32_param=3)}
    ).SerializeToString(),
}


@pytest.mark.parametrize("path", WRITES)
def test_with_a_key_only_those_who_have_it_administer_the_server(
    lab: FrontDoorLab, talk: Talk, served: Callable[[AdminOptions], None], path: str
) -> None:
    served(AdminOptions("key", "secret"))
    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
    for metadata in ((), ((ADMIN_KEY[0], "Secret"),)):
        found = talk(lab, lambda channel, sent=metadata: outcome(channel, path, WRITES[path], sent))
        assert found == (grpc.StatusCode.UNAVAILABLE, text)
    assert lab.repository.calls == []
    assert lab.kernel.trace.get().trace_rate == 1000
    assert lab.kernel.log.values.log_verbose_level == 0
    found = talk(lab, lambda channel: outcome(channel, path, WRITES[path], (ADMIN_KEY,)))
    assert text not in found[1]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("path", WRITES)
def test_with_local_access_only_clients_on_the_machine_administer_the_server(
    lab: FrontDoorLab,
    talk: Talk,
    served: Callable[[AdminOptions], None],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    local: bool,
) -> None:
    monkeypatch.setattr("protocols.access.is_local", lambda peer: local)
    served(AdminOptions("local"))
    _, text = talk(lab, lambda channel: outcome(channel, path, WRITES[path]))
    refused = "This protocol is restricted to clients on the server's machine (--admin-access=local)"
    assert (text == refused) is not local


def test_settings_can_be_read_without_the_key(
    lab: FrontDoorLab, talk: Talk, served: Callable[[AdminOptions], None]
) -> None:
    served(AdminOptions("key", "secret"))
    for name in ("TraceSetting", "LogSettings", "RepositoryIndex", "SystemSharedMemoryStatus", "ModelStatistics"):
        assert talk(lab, lambda channel, name=name: outcome(channel, f"{SERVICE}/{name}", b""))[0] is grpc.StatusCode.OK


# ---- browsers --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [MODEL_INFER, MODEL_LOAD, f"{SERVICE}/LogSettings", MODEL_STREAM_INFER])
@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_what_a_page_may_send_without_a_permission_is_no_grpc(lab: FrontDoorLab, path: str, content_type: str) -> None:
    """A browser sends other content types to another origin only after an OPTIONS whose response allows them."""
    message = pb.RepositoryModelLoadRequest(model_name="m").SerializeToString()
    octets = bytes([0, *len(message).to_bytes(4, "big")]) + message
    response = ask(lab, fields(path, content_type=content_type, origin="https://evil.example"), octets)
    assert response[":status"] == "415"
    assert lab.repository.calls == []


def test_the_question_for_a_permission_gets_none(lab: FrontDoorLab) -> None:
    asks = {"origin": "https://evil.example", "access_control_request_method": "POST"}
    headers = [(name, value) for name, value in fields(MODEL_LOAD, **asks) if name not in ("content-type", "te")]
    headers[0] = (":method", "OPTIONS")
    response = ask(lab, headers, None)
    assert response[":status"] != "200"
    assert not [name for name in response if name.startswith("access-control")]
