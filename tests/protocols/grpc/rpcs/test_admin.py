"""The administrative RPCs, called as functions."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import InvalidArgument, ServingError, Unsupported
from kernel.observe.reporting.instance_memory import MemoryUsage
from kernel.observe.statistics import Duration, ResponseStatistics
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import RecordingSink
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.rpc import Caller
from protocols.grpc.rpcs.admin import ModelRpcs, RepositoryRpcs, ServerRpcs
from protocols.testing import FrontDoorLab
from shm.tensor import Tensor

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
    rpcs = ServerRpcs(lab.kernel)
    assert done(rpcs.live(pb.ServerLiveRequest(), CALLER)).live
    assert done(rpcs.ready(pb.ServerReadyRequest(), CALLER)).ready
    metadata = done(rpcs.metadata(pb.ServerMetadataRequest(), CALLER))
    assert metadata.name == "triton"
    assert list(metadata.extensions) == list(lab.kernel.identity.extensions)


@pytest.mark.parametrize(
    ("name", "version", "ready"),
    [("m", "", True), ("m", "3", True), ("m", "2", False), ("nothing", "", False), ("nothing", "1", False)],
)
def test_a_model_that_does_not_exist_is_not_ready(lab: FrontDoorLab, name: str, version: str, ready: bool) -> None:
    message = pb.ModelReadyRequest(name=name, version=version)
    assert done(ModelRpcs(lab.kernel).ready(message, CALLER)).ready is ready


def test_a_version_that_is_not_a_number_is_an_error(lab: FrontDoorLab) -> None:
    kind, text = refusal(ModelRpcs(lab.kernel).ready(pb.ModelReadyRequest(name="m", version="x"), CALLER))
    assert kind is InvalidArgument
    assert text.startswith("failed to get model version from specified version string 'x'")


@pytest.mark.parametrize(("version", "versions"), [("", ["1", "3"]), ("3", ["3"])])
def test_metadata_lists_the_ready_versions_or_the_one_asked_for(
    lab: FrontDoorLab, version: str, versions: list[str]
) -> None:
    message = pb.ModelMetadataRequest(name="m", version=version)
    metadata = done(ModelRpcs(lab.kernel).metadata(message, CALLER))
    kind = pb.ModelMetadataResponse.TensorMetadata
    assert metadata == pb.ModelMetadataResponse(
        name="m",
        versions=versions,
        platform="python",
        inputs=[kind(name="IN", datatype="FP32", shape=[-1, 4])],
        outputs=[kind(name="OUT", datatype="BYTES", shape=[-1, -1])],
    )


def test_the_configuration_is_that_of_the_model(lab: FrontDoorLab) -> None:
    response = done(ModelRpcs(lab.kernel).config(pb.ModelConfigRequest(name="m"), CALLER))
    assert response.config == lab.kernel.resolve("m").config


def test_statistics_have_all_durations_also_before_the_first_request(lab: FrontDoorLab) -> None:
    response = done(ModelRpcs(lab.kernel).statistics(pb.ModelStatisticsRequest(name="m"), CALLER))
    assert [(s.name, s.version) for s in response.model_stats] == [("m", "1"), ("m", "3")]
    fields = response.model_stats[0].inference_stats.ListFields()
    assert len(fields) == len(pb.InferStatistics.DESCRIPTOR.fields)
    assert all(duration == pb.StatisticDuration() for _, duration in fields)


def test_statistics_count_requests_and_batches(lab: FrontDoorLab) -> None:
    tensor = Tensor("IN", "FP32", [2, 4], data=bytes(32))
    lab.kernel.submit(Request("m", [tensor], RecordingSink()))
    message = pb.ModelStatisticsRequest(name="m", version="3")
    (reported,) = done(ModelRpcs(lab.kernel).statistics(message, CALLER)).model_stats
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
    (reported,) = done(ModelRpcs(lab.kernel).statistics(message, CALLER)).model_stats
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
    assert refusal(ModelRpcs(lab.kernel).statistics(message, CALLER)) == (InvalidArgument, text)


# ---- repository -----------------------------------------------------------------------------


def test_the_index_shows_versions_states_and_reasons(lab: FrontDoorLab) -> None:
    lab.catalog.set_known({"m", "never_loaded", "caf\udce9"})
    rpcs = RepositoryRpcs(lab.kernel)
    found = done(rpcs.index(pb.RepositoryIndexRequest(), CALLER)).models
    assert [(m.name, m.version, m.state) for m in found] == [
        ("caf?", "", ""),
        ("m", "1", "READY"),
        ("m", "3", "READY"),
        ("never_loaded", "", ""),
    ]
    ready = done(rpcs.index(pb.RepositoryIndexRequest(ready=True), CALLER)).models
    assert [m.version for m in ready] == ["1", "3"]


def test_loading_passes_configuration_and_files_on(lab: FrontDoorLab) -> None:
    parameter = pb.ModelRepositoryParameter
    parameters = {"config": parameter(string_param="{}"), "file:1/model.py": parameter(bytes_param=b"pass")}
    rpcs = RepositoryRpcs(lab.kernel)
    done(rpcs.load(pb.RepositoryModelLoadRequest(model_name="m", parameters=parameters)))
    done(rpcs.load(pb.RepositoryModelLoadRequest(model_name="n")))
    assert lab.repository.calls == [
        ("load", "m", {"config": "{}", "file:1/model.py": b"pass"}),
        ("load", "n", None),
    ]


def test_unloading_passes_the_choice_about_dependents_on(lab: FrontDoorLab) -> None:
    parameter = pb.ModelRepositoryParameter
    rpcs = RepositoryRpcs(lab.kernel)
    dependents = {"unload_dependents": parameter(bool_param=True), "other": parameter(int64_param=1)}
    done(rpcs.unload(pb.RepositoryModelUnloadRequest(model_name="m", parameters=dependents), CALLER))
    done(rpcs.unload(pb.RepositoryModelUnloadRequest(model_name="n"), CALLER))
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
    assert refusal(RepositoryRpcs(lab.kernel).load(message)) == (InvalidArgument, text)
    assert lab.repository.calls == []


def test_an_unload_parameter_of_a_wrong_kind_is_refused(lab: FrontDoorLab) -> None:
    parameters = {"unload_dependents": pb.ModelRepositoryParameter(int64_param=1)}
    message = pb.RepositoryModelUnloadRequest(model_name="m", parameters=parameters)
    assert refusal(RepositoryRpcs(lab.kernel).unload(message, CALLER)) == (
        InvalidArgument,
        "invalid value type for 'unload_dependents' parameter, expected bool_param.",
    )


def test_a_repository_cannot_be_named(lab: FrontDoorLab) -> None:
    rpcs = RepositoryRpcs(lab.kernel)
    wanted = (Unsupported, "'repository_name' specification is not supported")
    assert refusal(rpcs.index(pb.RepositoryIndexRequest(repository_name="r"), CALLER)) == wanted
    assert refusal(rpcs.load(pb.RepositoryModelLoadRequest(repository_name="r"))) == wanted
    assert refusal(rpcs.unload(pb.RepositoryModelUnloadRequest(repository_name="r"), CALLER)) == wanted
