"""What gRPC clients read and change of the server, its models and its repository."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import msgspec
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from kernel.errors import InvalidArgument, ModelNotFound, ModelNotReady, NoAvailableVersion, Unsupported
from kernel.observe.report import model_report
from kernel.observe.statistics import Duration
from kernel.server_paths import SERVER_PATHS
from kernel.serving.front_doors.model_metadata import model_metadata
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.grpclib_internals import stream_of
from protocols.grpc.messages.load_request import parse_load_request
from protocols.grpc.rpc import translated_errors
from protocols.grpc.status_text import clean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from grpclib.server import Stream

    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.observe.report import InferBatchStatistics, InferStatistics, ModelReport
    from kernel.observe.statistics import ResponseStatistics
    from kernel.serving.front_doors.interface import KernelInterface
    from kernel.serving.front_doors.model_figures import ModelFigures
    from protocols.grpc.handlers import HandlerCall
    from protocols.grpc.rpc import Caller

_NO_FILES: Mapping[str, memoryview] = MappingProxyType({})


class ServerRpcs:
    """Health and metadata of the server."""

    def __init__(self, kernel: KernelInterface) -> None:
        self._kernel = kernel

    async def live(self, message: pb.ServerLiveRequest, caller: Caller) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._kernel.live())

    async def ready(self, message: pb.ServerReadyRequest, caller: Caller) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self._kernel.server_is_ready())

    async def metadata(self, message: pb.ServerMetadataRequest, caller: Caller) -> pb.ServerMetadataResponse:
        identity = self._kernel.identity
        return pb.ServerMetadataResponse(name=identity.name, version=identity.version, extensions=identity.extensions)


class ModelRpcs:
    """State, metadata, configuration and statistics of models."""

    def __init__(self, kernel: KernelInterface) -> None:
        self._kernel = kernel

    async def ready(self, message: pb.ModelReadyRequest, caller: Caller) -> pb.ModelReadyResponse:
        """Return whether a version is ready; one that does not exist is not (Triton)."""
        try:
            ready = await self._kernel.model_is_ready(message.name, message.version)
        except (ModelNotFound, NoAvailableVersion, ModelNotReady):
            ready = False
        return pb.ModelReadyResponse(ready=ready)

    async def metadata(self, message: pb.ModelMetadataRequest, caller: Caller) -> pb.ModelMetadataResponse:
        model = self._kernel.served_figures(message.name, message.version)
        versions = [model.version]
        if not message.version:
            versions = [ready.version for ready in self._kernel.figures(message.name)]
        metadata = model_metadata(model.spec, versions)
        response = pb.ModelMetadataResponse(name=metadata.name, versions=metadata.versions, platform=metadata.platform)
        for tensor in metadata.inputs:
            response.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        for tensor in metadata.outputs:
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        return response

    async def config(self, message: pb.ModelConfigRequest, caller: Caller) -> pb.ModelConfigResponse:
        model = self._kernel.served_figures(message.name, message.version)
        return pb.ModelConfigResponse(config=model.config)

    async def statistics(self, message: pb.ModelStatisticsRequest, caller: Caller) -> pb.ModelStatisticsResponse:
        """Report on a version, the ready versions of a model, or all that is ready."""
        response = pb.ModelStatisticsResponse()
        for model in self._with_statistics(message.name, message.version):
            _encode_statistics(model_report(model), response.model_stats.add())
        return response

    def _with_statistics(self, name: str, version: str) -> list[ModelFigures]:
        number = self._kernel.catalog.number_of(name, version) if version else None
        models = self._kernel.figures(name)
        if not name:
            return models
        if not models:
            raise InvalidArgument(f"requested model '{name}' is not available")
        if number is None:
            return models
        models = [model for model in models if model.version == number]
        if not models:
            raise InvalidArgument(f"requested model version is not available for model '{name}'")
        return models


class RepositoryRpcs:
    """The model repository: list, load, unload."""

    def __init__(self, kernel: KernelInterface) -> None:
        self._kernel = kernel

    async def index(self, message: pb.RepositoryIndexRequest, caller: Caller) -> pb.RepositoryIndexResponse:
        _check_repository(message.repository_name)
        response = pb.RepositoryIndexResponse()
        for item in await self._kernel.repository.index(message.ready):
            response.models.add(
                name=clean(item.name),
                version=item.version,
                state=item.state,
                reason=clean(SERVER_PATHS.hidden_in(item.reason)),
            )
        return response

    async def load(
        self, message: pb.RepositoryModelLoadRequest, files: Mapping[str, memoryview] = _NO_FILES
    ) -> pb.RepositoryModelLoadResponse:
        """Load a model; returns when it is ready. `files` were taken out of the message. Raises `ServingError`."""
        _check_repository(message.repository_name)
        parameters: dict[str, Any] = {
            key: _load_parameter(key, value) for key, value in sorted(message.parameters.items())
        }
        for key, content in files.items():
            _check_file_key(key)
            parameters[key] = content
        await self._kernel.repository.load(message.model_name, parameters or None)
        return pb.RepositoryModelLoadResponse()

    async def serve_load(self, stream: Stream[Any, pb.RepositoryModelLoadResponse]) -> None:
        """Serve a call of `load`. A handler of its own: grpclib and protobuf would copy the files."""
        with translated_errors("RepositoryModelLoadRequest"):
            call = cast("HandlerCall", stream_of(stream))
            buffers: list[ReceiveBuffer] = []
            try:
                call.receive_large_messages_in(lambda start, byte_size: self._buffer(byte_size, buffers))
                message = await call.receive_message()
                if message is None:
                    raise GRPCError(Status.UNIMPLEMENTED, "the call ended without a request message")
                response = await self.load(*parse_load_request(message))
            finally:
                for buffer in buffers:
                    buffer.release()
            await stream.send_message(response)

    def _buffer(self, byte_size: int, buffers: list[ReceiveBuffer]) -> memoryview:
        """Return memory for a large message. Raises `ArenaFull`."""
        buffers.append(self._kernel.message_buffer(byte_size))
        return buffers[-1].view

    async def unload(
        self, message: pb.RepositoryModelUnloadRequest, caller: Caller
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload a model; other parameters than `unload_dependents` are ignored (Triton)."""
        _check_repository(message.repository_name)
        unload_dependents = False
        if "unload_dependents" in message.parameters:
            parameter = message.parameters["unload_dependents"]
            if not parameter.HasField("bool_param"):
                raise InvalidArgument("invalid value type for 'unload_dependents' parameter, expected bool_param.")
            unload_dependents = parameter.bool_param
        await self._kernel.repository.unload(message.model_name, unload_dependents)
        return pb.RepositoryModelUnloadResponse()


def _check_repository(name: str) -> None:
    if name:
        raise Unsupported("'repository_name' specification is not supported")


def _check_file_key(key: str) -> None:
    """Raise `InvalidArgument` for a parameter with bytes that is not a file."""
    if key == "config":
        raise InvalidArgument("invalid value type for load parameter 'config', expected string_param.")
    if not key.startswith("file:"):
        raise InvalidArgument(f"unrecognized load parameter '{key}'.")


def _load_parameter(key: str, parameter: pb.ModelRepositoryParameter) -> str | bytes:
    if key == "config":
        if not parameter.HasField("string_param"):
            raise InvalidArgument("invalid value type for load parameter 'config', expected string_param.")
        return parameter.string_param
    if key.startswith("file:"):
        if not parameter.HasField("bytes_param"):
            raise InvalidArgument(f"invalid value type for load parameter '{key}', expected bytes_param.")
        return parameter.bytes_param
    raise InvalidArgument(f"unrecognized load parameter '{key}'.")


def _encode_statistics(report: ModelReport, message: pb.ModelStatistics) -> None:
    message.name = report.name
    message.version = report.version
    message.last_inference = report.last_inference
    message.inference_count = report.inference_count
    message.execution_count = report.execution_count
    message.inference_stats.CopyFrom(pb.InferStatistics(**_durations(report.inference_stats)))
    for index, response in report.response_stats.items():
        message.response_stats[index].CopyFrom(pb.InferResponseStatistics(**_durations(response)))
    for batch in report.batch_stats:
        message.batch_stats.add(batch_size=batch.batch_size, **_durations(batch))
    for memory in report.memory_usage:
        message.memory_usage.add(type=memory.type, id=memory.id, byte_size=memory.byte_size)


def _durations(section: InferStatistics | InferBatchStatistics | ResponseStatistics) -> dict[str, pb.StatisticDuration]:
    """Return the durations of a section by name: structs and messages have the same fields."""
    fields = msgspec.structs.asdict(section)
    return {
        name: pb.StatisticDuration(count=value.count, ns=value.ns)
        for name, value in fields.items()
        if isinstance(value, Duration)
    }
