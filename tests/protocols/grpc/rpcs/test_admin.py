"""The administrative RPCs, called as functions. Large files of load requests stay where the message was received."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import InvalidArgument, ServingError, Unsupported
from kernel.observe.execution_reports import MemoryUsage
from kernel.observe.statistics import Duration, ResponseStatistics
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import RecordingSink
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.rpc import Caller
from protocols.grpc.rpcs.admin import KernelRpcs, parse_load_request
from protocols.request_limits import MAX_PARTS
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

CALLER = Caller(("127.0.0.1", 40000))


def done(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def refusal(call: Coroutine[Any, Any, Any]) -> tuple[type[ServingError], str]:
    with pytest.raises(ServingError) as caught:
        done(call)
    return type(caught.value), caught.value.message


def finish(request: Request) -> None:
    request.respond(Response(request.model_name, "1", request.id, outputs=[]))


@pytest.fixture
def lab() -> FrontDoorLab:
    lab = FrontDoorLab()
    given, taken = TensorSpec("IN", "FP32", (4,), (-1, 4)), TensorSpec("OUT", "BYTES", (-1,), (-1, -1))
    spec = ModelSpec("m", "", "python", 8, {"IN": given}, {"OUT": taken})
    for version in (1, 3):
        lab.add_model(spec, finish, version=version)
    return lab


# ---- server and models ----------------------------------------------------------------------


def test_the_server_describes_itself(lab: FrontDoorLab) -> None:
    rpcs = KernelRpcs(lab.kernel)
    assert done(rpcs.server_live(pb.ServerLiveRequest(), CALLER)).live
    assert done(rpcs.server_ready(pb.ServerReadyRequest(), CALLER)).ready
    metadata = done(rpcs.server_metadata(pb.ServerMetadataRequest(), CALLER))
    assert metadata.name == "triton"
    assert list(metadata.extensions) == list(lab.kernel.identity.extensions)


@pytest.mark.parametrize(
    ("name", "version", "ready"),
    [("m", "", True), ("m", "3", True), ("m", "2", False), ("nothing", "", False), ("nothing", "1", False)],
)
def test_a_model_that_does_not_exist_is_not_ready(lab: FrontDoorLab, name: str, version: str, ready: bool) -> None:
    message = pb.ModelReadyRequest(name=name, version=version)
    assert done(KernelRpcs(lab.kernel).model_ready(message, CALLER)).ready is ready


def test_a_version_that_is_not_a_number_is_an_error(lab: FrontDoorLab) -> None:
    kind, text = refusal(KernelRpcs(lab.kernel).model_ready(pb.ModelReadyRequest(name="m", version="x"), CALLER))
    assert kind is InvalidArgument
    assert text.startswith("failed to get model version from specified version string 'x'")


@pytest.mark.parametrize(("version", "versions"), [("", ["1", "3"]), ("3", ["3"])])
def test_metadata_lists_the_ready_versions_or_the_one_asked_for(
    lab: FrontDoorLab, version: str, versions: list[str]
) -> None:
    message = pb.ModelMetadataRequest(name="m", version=version)
    metadata = done(KernelRpcs(lab.kernel).model_metadata(message, CALLER))
    kind = pb.ModelMetadataResponse.TensorMetadata
    assert metadata == pb.ModelMetadataResponse(
        name="m",
        versions=versions,
        platform="python",
        inputs=[kind(name="IN", datatype="FP32", shape=[-1, 4])],
        outputs=[kind(name="OUT", datatype="BYTES", shape=[-1, -1])],
    )


def test_the_configuration_is_that_of_the_model(lab: FrontDoorLab) -> None:
    response = done(KernelRpcs(lab.kernel).model_config(pb.ModelConfigRequest(name="m"), CALLER))
    assert response.config == lab.kernel.resolve("m").config


def test_statistics_have_all_durations_also_before_the_first_request(lab: FrontDoorLab) -> None:
    response = done(KernelRpcs(lab.kernel).model_statistics(pb.ModelStatisticsRequest(name="m"), CALLER))
    assert [(s.name, s.version) for s in response.model_stats] == [("m", "1"), ("m", "3")]
    fields = response.model_stats[0].inference_stats.ListFields()
    assert len(fields) == len(pb.InferStatistics.DESCRIPTOR.fields)
    assert all(duration == pb.StatisticDuration() for _, duration in fields)


def test_statistics_count_requests_and_batches(lab: FrontDoorLab) -> None:
    tensor = Tensor("IN", "FP32", [2, 4], data=bytes(32))
    lab.kernel.submit(Request("m", [tensor], RecordingSink()))
    message = pb.ModelStatisticsRequest(name="m", version="3")
    (reported,) = done(KernelRpcs(lab.kernel).model_statistics(message, CALLER)).model_stats
    assert (reported.inference_count, reported.execution_count) == (2, 1)
    assert reported.last_inference == lab.clock.wall_ns() // 1_000_000
    assert reported.inference_stats.success.count == 1
    assert reported.inference_stats.compute_infer.ns == 2_000
    (batch,) = reported.batch_stats
    assert (batch.batch_size, batch.compute_input.ns, batch.compute_output.count) == (2, 1_000, 1)


def test_statistics_have_the_sections_that_backends_report(lab: FrontDoorLab) -> None:
    statistics = lab.kernel.resolve("m").statistics
    statistics.responses["0"] = ResponseStatistics(*(Duration(count, 10 * count) for count in range(1, 7)))
    statistics.memory.report("m_0", [MemoryUsage("CPU_PINNED", 2, 4096)])
    message = pb.ModelStatisticsRequest(name="m", version="3")
    (reported,) = done(KernelRpcs(lab.kernel).model_statistics(message, CALLER)).model_stats
    fields = reported.response_stats["0"].ListFields()
    assert [(field.name, duration.count, duration.ns) for field, duration in fields] == [
        ("compute_infer", 1, 10),
        ("compute_output", 2, 20),
        ("success", 3, 30),
        ("fail", 4, 40),
        ("empty_response", 5, 50),
        ("cancel", 6, 60),
    ]
    (memory,) = reported.memory_usage
    assert (memory.type, memory.id, memory.byte_size) == ("CPU_PINNED", 2, 4096)


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("nothing", "", "requested model 'nothing' is not available"),
        ("nothing", "1", "requested model 'nothing' is not available"),
        ("m", "2", "requested model version is not available for model 'm'"),
    ],
)
def test_statistics_of_what_is_not_ready_are_refused(lab: FrontDoorLab, name: str, version: str, text: str) -> None:
    message = pb.ModelStatisticsRequest(name=name, version=version)
    assert refusal(KernelRpcs(lab.kernel).model_statistics(message, CALLER)) == (InvalidArgument, text)


# ---- repository -----------------------------------------------------------------------------


def test_the_index_shows_versions_states_and_reasons(lab: FrontDoorLab) -> None:
    lab.catalog.set_known({"m", "never_loaded", "caf\udce9"})
    rpcs = KernelRpcs(lab.kernel)
    found = done(rpcs.repository_index(pb.RepositoryIndexRequest(), CALLER)).models
    assert [(m.name, m.version, m.state) for m in found] == [
        ("caf?", "", ""),
        ("m", "1", "READY"),
        ("m", "3", "READY"),
        ("never_loaded", "", ""),
    ]
    ready = done(rpcs.repository_index(pb.RepositoryIndexRequest(ready=True), CALLER)).models
    assert [m.version for m in ready] == ["1", "3"]


def test_loading_passes_configuration_and_files_on(lab: FrontDoorLab) -> None:
    parameter = pb.ModelRepositoryParameter
    parameters = {"config": parameter(string_param="{}"), "file:1/model.py": parameter(bytes_param=b"pass")}
    rpcs = KernelRpcs(lab.kernel)
    done(rpcs.load_model(pb.RepositoryModelLoadRequest(model_name="m", parameters=parameters)))
    done(rpcs.load_model(pb.RepositoryModelLoadRequest(model_name="n")))
    assert lab.repository.calls == [
        ("load", "m", {"config": "{}", "file:1/model.py": b"pass"}),
        ("load", "n", None),
    ]


def test_unloading_passes_the_choice_about_dependents_on(lab: FrontDoorLab) -> None:
    parameter = pb.ModelRepositoryParameter
    rpcs = KernelRpcs(lab.kernel)
    dependents = {"unload_dependents": parameter(bool_param=True), "other": parameter(int64_param=1)}
    done(rpcs.repository_model_unload(pb.RepositoryModelUnloadRequest(model_name="m", parameters=dependents), CALLER))
    done(rpcs.repository_model_unload(pb.RepositoryModelUnloadRequest(model_name="n"), CALLER))
    assert lab.repository.calls == [("unload", "m", True), ("unload", "n", False)]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("config", "invalid value type for load parameter 'config', expected string_param."),
        ("file:1/m", "invalid value type for load parameter 'file:1/m', expected bytes_param."),
        ("other", "unrecognized load parameter 'other'."),
    ],
)
def test_a_load_parameter_of_a_wrong_kind_is_refused(lab: FrontDoorLab, key: str, text: str) -> None:
    parameters = {key: pb.ModelRepositoryParameter(int64_param=1)}
    message = pb.RepositoryModelLoadRequest(model_name="m", parameters=parameters)
    assert refusal(KernelRpcs(lab.kernel).load_model(message)) == (InvalidArgument, text)
    assert lab.repository.calls == []


def test_an_unload_parameter_of_a_wrong_kind_is_refused(lab: FrontDoorLab) -> None:
    parameters = {"unload_dependents": pb.ModelRepositoryParameter(int64_param=1)}
    message = pb.RepositoryModelUnloadRequest(model_name="m", parameters=parameters)
    assert refusal(KernelRpcs(lab.kernel).repository_model_unload(message, CALLER)) == (
        InvalidArgument,
        "invalid value type for 'unload_dependents' parameter, expected bool_param.",
    )


def test_a_repository_cannot_be_named(lab: FrontDoorLab) -> None:
    rpcs = KernelRpcs(lab.kernel)
    wanted = (Unsupported, "'repository_name' specification is not supported")
    assert refusal(rpcs.repository_index(pb.RepositoryIndexRequest(repository_name="r"), CALLER)) == wanted
    assert refusal(rpcs.load_model(pb.RepositoryModelLoadRequest(repository_name="r"))) == wanted
    assert refusal(rpcs.repository_model_unload(pb.RepositoryModelUnloadRequest(repository_name="r"), CALLER)) == wanted


def load_request(**values: bytes | str | int) -> bytes:
    message = pb.RepositoryModelLoadRequest(model_name="m")
    for key, value in values.items():
        if isinstance(value, bytes):
            message.parameters[key].bytes_param = value
        elif isinstance(value, str):
            message.parameters[key].string_param = value
        else:
            message.parameters[key].int64_param = value
    return message.SerializeToString()


def test_large_files_are_views_of_the_message() -> None:
    content = bytes(range(256)) * 400
    values: dict[str, bytes | str] = {"config": "{}", "file:1/large": content, "file:1/small": b"abc"}
    octets = load_request(**values)
    request, files = parse_load_request(octets)
    assert (request.model_name, sorted(request.parameters)) == ("m", ["config", "file:1/small"])
    assert request.parameters["file:1/small"].bytes_param == b"abc"
    assert {key: bytes(found) for key, found in files.items()} == {"file:1/large": content}
    assert files["file:1/large"].obj is octets


def test_large_parameters_that_are_no_files_are_parsed_up_to_a_limit() -> None:
    request, files = parse_load_request(load_request(config="x" * 5000))
    assert (len(request.parameters["config"].string_param), files) == (5000, {})


@pytest.mark.parametrize(
    "octets",
    [
        load_request(config="x" * (2 << 20)),
        load_request(**{f"config{number}": "x" * (1 << 19) for number in range(5)}),
        pb.RepositoryModelLoadRequest(repository_name="x" * (2 << 20)).SerializeToString(),
        pb.RepositoryModelLoadRequest(model_name="x" * (2 << 20)).SerializeToString(),
    ],
    ids=["one", "several", "repository", "model"],
)
def test_long_texts_that_are_no_files_are_refused_before_they_are_parsed(octets: bytes) -> None:
    with pytest.raises(InvalidArgument, match="that are no files take more than 2097152 bytes"):
        parse_load_request(octets)


def test_too_many_parameters_are_refused_before_they_are_parsed() -> None:
    parse_load_request(load_request(**{str(number): number for number in range(MAX_PARTS)}))
    for octets in (load_request(**{str(number): number for number in range(MAX_PARTS + 2)}), b"\x78\0" * 1000):
        with pytest.raises(InvalidArgument, match="the request has too many parameters, expected at most 512"):
            parse_load_request(octets)


@pytest.mark.parametrize("octets", [b"\x1a\xff\xff\xff\xff\x0f", b"\x03", b"\x00\x00", b"\x1a\x05abc"])
def test_what_is_no_message_is_a_decode_error(octets: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_load_request(octets)


def test_a_key_that_is_not_utf_8_is_a_decode_error() -> None:
    octets = load_request(**{"file:1/large": bytes(5000)}).replace(b"large", b"lar\xffe")
    with pytest.raises(DecodeError):
        parse_load_request(octets)


SMALL, LARGE = b"s" * 10, b"L" * 5000


def entry(key: str, content: bytes) -> bytes:
    """A parameter as it is in the message, alone."""
    request = pb.RepositoryModelLoadRequest()
    request.parameters[key].bytes_param = content
    return request.SerializeToString()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([SMALL, LARGE, b"t" * 10, b"M" * 5000])), max_size=6))
def test_of_several_files_with_one_key_the_last_one_counts(entries: list[tuple[str, bytes]]) -> None:
    octets = b"".join(entry(*each) for each in entries)
    request, files = parse_load_request(octets)
    found = {key: value.bytes_param for key, value in request.parameters.items()}
    assert not found.keys() & files.keys()
    found |= {key: bytes(value) for key, value in files.items()}
    expected = pb.RepositoryModelLoadRequest.FromString(octets)
    assert found == {key: value.bytes_param for key, value in expected.parameters.items()}


def test_a_group_with_many_fields_is_refused_and_not_walked_over() -> None:
    """On the event loop a group of 1 MiB would take a second."""
    group = b"\xf3\x01" + b"\x08\x01" * 1000 + b"\xf4\x01"
    with pytest.raises(DecodeError, match="groups with too many fields"):
        parse_load_request(load_request() + group)
    few = b"\xf3\x01" + b"\x08\x01" * 100 + b"\xf4\x01"
    assert parse_load_request(load_request() + few)[0].model_name == "m"
    with pytest.raises(DecodeError, match="groups with too many fields"):  # all groups together
        parse_load_request(load_request() + few + few)


Trace = pb.TraceSettingRequest.SettingValue

Log = pb.LogSettingsRequest.SettingValue


@pytest.fixture
def rpcs() -> KernelRpcs:
    lab = FrontDoorLab()
    lab.add_model(ModelSpec("m", "", "test", 0, {}, {}), lambda request: None)
    return KernelRpcs(lab.kernel)


# ---- trace ----------------------------------------------------------------------------------


def trace(rpcs: KernelRpcs, settings: dict[str, list[str]], model: str = "") -> dict[str, list[str]]:
    values = {name: Trace(value=texts) for name, texts in settings.items()}
    message = pb.TraceSettingRequest(settings=values, model_name=model)
    response = done(rpcs.trace_setting(message, CALLER))
    return {name: list(value.value) for name, value in response.settings.items()}


DEFAULTS = {
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_file": [""],
    "trace_mode": ["triton"],
}


def test_trace_settings_are_shown_changed_and_cleared(rpcs: KernelRpcs) -> None:
    assert trace(rpcs, {}) == DEFAULTS
    assert trace(rpcs, {"trace_rate": ["7"]}) == {**DEFAULTS, "trace_rate": ["7"]}
    assert trace(rpcs, {"trace_rate": ["9"]}, "m")["trace_rate"] == ["9"]
    assert trace(rpcs, {})["trace_rate"] == ["7"]
    assert trace(rpcs, {"trace_rate": []}, "m")["trace_rate"] == ["7"]
    assert trace(rpcs, {"trace_rate": []}) == DEFAULTS


def test_trace_settings_that_do_not_exist_are_ignored(rpcs: KernelRpcs) -> None:
    assert trace(rpcs, {"bogus": ["1"], "trace_mode": ["x"]}) == DEFAULTS


@pytest.mark.parametrize("texts", [["f"], []])
def test_the_trace_file_cannot_be_changed(rpcs: KernelRpcs, texts: list[str]) -> None:
    message = pb.TraceSettingRequest(settings={"trace_file": Trace(value=texts), "trace_rate": Trace(value=["x"])})
    assert refusal(rpcs.trace_setting(message, CALLER)) == (
        Unsupported,
        "trace file location can not be updated through network protocol",
    )


def test_trace_settings_of_an_unknown_model_are_refused(rpcs: KernelRpcs) -> None:
    message = pb.TraceSettingRequest(model_name="nothing")
    assert refusal(rpcs.trace_setting(message, CALLER)) == (
        InvalidArgument,
        "Request for unknown model : nothing",
    )


# ---- log ------------------------------------------------------------------------------------


def log(rpcs: KernelRpcs, **settings: Log) -> dict[str, bool | int | str]:
    response = done(rpcs.log_settings(pb.LogSettingsRequest(settings=settings), CALLER))
    shown: dict[str, bool | int | str] = {}
    for name, value in response.settings.items():
        ((_, shown[name]),) = value.ListFields()
    return shown


def test_log_settings_are_shown_and_changed(rpcs: KernelRpcs) -> None:
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
def test_a_log_setting_of_a_wrong_type_is_refused(rpcs: KernelRpcs, name: str, value: Log, text: str) -> None:
    message = pb.LogSettingsRequest(settings={name: value})
    assert refusal(rpcs.log_settings(message, CALLER)) == (InvalidArgument, text)


def test_the_log_file_cannot_be_changed(rpcs: KernelRpcs) -> None:
    message = pb.LogSettingsRequest(settings={"log_file": Log(bool_param=True)})
    assert refusal(rpcs.log_settings(message, CALLER)) == (
        Unsupported,
        "log file location can not be updated through network protocol",
    )
