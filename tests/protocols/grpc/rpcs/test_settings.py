import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from kernel.config.spec import ModelSpec
from kernel.errors import InvalidArgument, ServingError, Unsupported
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.rpc import Caller
from protocols.grpc.rpcs.settings import SettingsRpcs
from protocols.restricted import AdminAccess
from protocols.testing import FrontDoorLab

T = TypeVar("T")
CALLER = Caller(("127.0.0.1", 40000))
Trace = pb.TraceSettingRequest.SettingValue
Log = pb.LogSettingsRequest.SettingValue


def done(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def refusal(call: Coroutine[Any, Any, Any]) -> tuple[type[ServingError], str]:
    with pytest.raises(ServingError) as caught:
        done(call)
    return type(caught.value), caught.value.message


@pytest.fixture
def rpcs() -> SettingsRpcs:
    lab = FrontDoorLab()
    lab.add_model(ModelSpec("m", "", "test", 0, {}, {}), lambda request: None)
    return SettingsRpcs(lab.kernel, AdminAccess())


# ---- trace ----------------------------------------------------------------------------------


def trace(rpcs: SettingsRpcs, settings: dict[str, list[str]], model: str = "") -> dict[str, list[str]]:
    values = {name: Trace(value=texts) for name, texts in settings.items()}
    message = pb.TraceSettingRequest(settings=values, model_name=model)
    response = done(rpcs.trace(message, CALLER))
    return {name: list(value.value) for name, value in response.settings.items()}


DEFAULTS = {
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_file": [""],
    "trace_mode": ["triton"],
}


def test_trace_settings_are_shown_changed_and_cleared(rpcs: SettingsRpcs) -> None:
    assert trace(rpcs, {}) == DEFAULTS
    assert trace(rpcs, {"trace_rate": ["7"]}) == {**DEFAULTS, "trace_rate": ["7"]}
    assert trace(rpcs, {"trace_rate": ["9"]}, "m")["trace_rate"] == ["9"]
    assert trace(rpcs, {})["trace_rate"] == ["7"]
    assert trace(rpcs, {"trace_rate": []}, "m")["trace_rate"] == ["7"]
    assert trace(rpcs, {"trace_rate": []}) == DEFAULTS


def test_trace_settings_that_do_not_exist_are_ignored(rpcs: SettingsRpcs) -> None:
    assert trace(rpcs, {"bogus": ["1"], "trace_mode": ["x"]}) == DEFAULTS


@pytest.mark.parametrize("texts", [["f"], []])
def test_the_trace_file_cannot_be_changed(rpcs: SettingsRpcs, texts: list[str]) -> None:
    message = pb.TraceSettingRequest(settings={"trace_file": Trace(value=texts), "trace_rate": Trace(value=["x"])})
    assert refusal(rpcs.trace(message, CALLER)) == (
        Unsupported,
        "trace file location can not be updated through network protocol",
    )


def test_trace_settings_of_an_unknown_model_are_refused(rpcs: SettingsRpcs) -> None:
    message = pb.TraceSettingRequest(model_name="nothing")
    assert refusal(rpcs.trace(message, CALLER)) == (
        InvalidArgument,
        "Request for unknown model : nothing",
    )


# ---- log ------------------------------------------------------------------------------------


def log(rpcs: SettingsRpcs, **settings: Log) -> dict[str, bool | int | str]:
    response = done(rpcs.log(pb.LogSettingsRequest(settings=settings), CALLER))
    shown: dict[str, bool | int | str] = {}
    for name, value in response.settings.items():
        ((_, shown[name]),) = value.ListFields()
    return shown


def test_log_settings_are_shown_and_changed(rpcs: SettingsRpcs) -> None:
    defaults = {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert log(rpcs) == defaults
    changed = log(
        rpcs,
        log_info=Log(bool_param=False),
        log_verbose_level=Log(uint32_param=2),
        log_format=Log(string_param="ISO8601"),
        bogus=Log(bool_param=True),
    )
    assert changed == {**defaults, "log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert log(rpcs) == changed


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("log_info", Log(string_param="x"), "expect boolean for 'log_info'"),
        ("log_warning", Log(), "expect boolean for 'log_warning'"),
        ("log_verbose_level", Log(bool_param=True), "expect int32 for 'log_verbose_level'"),
        ("log_format", Log(uint32_param=1), "expect string for 'log_format'"),
    ],
)
def test_a_log_setting_of_a_wrong_type_is_refused(rpcs: SettingsRpcs, name: str, value: Log, text: str) -> None:
    message = pb.LogSettingsRequest(settings={name: value})
    assert refusal(rpcs.log(message, CALLER)) == (InvalidArgument, text)


def test_the_log_file_cannot_be_changed(rpcs: SettingsRpcs) -> None:
    message = pb.LogSettingsRequest(settings={"log_file": Log(bool_param=True)})
    assert refusal(rpcs.log(message, CALLER)) == (
        Unsupported,
        "log file location can not be updated through network protocol",
    )
