"""What gRPC clients read and change of the server: models, their repository, settings, shared memory.

Values of settings are checked by `kernel.settings`. Settings that Triton does not know are ignored, as it does over
gRPC and not over HTTP. Files in a RepositoryModelLoadRequest may be large: they stay where the message was received.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import msgspec
from google.protobuf.message import DecodeError
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from kernel.errors import InvalidArgument, ModelNotFound, ModelNotReady, NoAvailableVersion, Unavailable, Unsupported
from kernel.observe.statistics import Duration
from kernel.serving.model_figures import model_metadata, model_report
from kernel.texts import SERVER_PATHS
from protocols.access import EVERY_CLIENT, check_traced_model
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.generated.grpc_service_pb2 import RepositoryModelLoadRequest
from protocols.grpc.grpclib_internals import clean, stream_of
from protocols.grpc.rpc import translated_errors
from protocols.grpc.wire_format import MAX_LOOP_FIELDS, MessageField, fields_of
from protocols.request_limits import check_count
from shm.region import RegionKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from grpclib.server import Stream

    from kernel.memory.input_placement import ReceiveBuffer
    from kernel.observe.statistics import ResponseStatistics
    from kernel.serving.interface import KernelInterface
    from kernel.serving.model_figures import InferBatchStatistics, InferStatistics, ModelFigures, ModelReport
    from kernel.settings import TraceChange
    from protocols.access import AdminAccess
    from protocols.grpc.handlers import HandlerCall
    from protocols.grpc.rpc import Caller
    from shm.tensor import Buffer

#: Numbers of the fields: a parameter of a request, its key and value in the map, the bytes in a value.
_PARAMETER, _KEY, _VALUE, _BYTES = 3, 1, 2, 4

#: The fields beside the parameters: the names of the repository and of the model.
_OTHER_FIELDS = 2

#: Parameters up to this size are parsed by protobuf.
_SMALL_BYTE_SIZE = 4096

#: The most bytes of a request without its large files: protobuf copies them in one piece. The configuration has a
#: smaller limit of its own.
_MAX_BYTE_SIZE = 2 << 20

_NO_FILES: Mapping[str, memoryview] = MappingProxyType({})


#: What can be asked for, in the order in which Triton looks at it. A change of the file is refused.
_TRACE_SETTINGS = ("trace_file", "trace_level", "trace_rate", "trace_count", "log_frequency")

#: The same for logs, with the field of the value and what Triton calls it.
_LOG_SETTINGS = (
    ("log_info", "bool_param", "boolean"),
    ("log_warning", "bool_param", "boolean"),
    ("log_error", "bool_param", "boolean"),
    ("log_verbose_level", "uint32_param", "int32"),
    ("log_format", "string_param", "string"),
)


class KernelRpcs:
    """The RPCs of Triton's service except for inference. Each gets a message and the caller; raises `ServingError`."""

    def __init__(self, kernel: KernelInterface, admin: AdminAccess = EVERY_CLIENT) -> None:
        """`admin` says who may change settings; whole calls are refused before they come here."""
        self._kernel = kernel
        self._admin = admin

    # ---- the server --------------------------------------------------------------------------

    async def server_live(self, message: pb.ServerLiveRequest, caller: Caller) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._kernel.live())

    async def server_ready(self, message: pb.ServerReadyRequest, caller: Caller) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self._kernel.server_is_ready())

    async def server_metadata(self, message: pb.ServerMetadataRequest, caller: Caller) -> pb.ServerMetadataResponse:
        identity = self._kernel.identity
        return pb.ServerMetadataResponse(name=identity.name, version=identity.version, extensions=identity.extensions)

    # ---- models ----------------------------------------------------------------------------

    async def model_ready(self, message: pb.ModelReadyRequest, caller: Caller) -> pb.ModelReadyResponse:
        """Return whether a version is ready; one that does not exist is not (Triton)."""
        try:
            ready = await self._kernel.model_is_ready(message.name, message.version)
        except (ModelNotFound, NoAvailableVersion, ModelNotReady):
            ready = False
        return pb.ModelReadyResponse(ready=ready)

    async def model_metadata(self, message: pb.ModelMetadataRequest, caller: Caller) -> pb.ModelMetadataResponse:
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

    async def model_config(self, message: pb.ModelConfigRequest, caller: Caller) -> pb.ModelConfigResponse:
        model = self._kernel.served_figures(message.name, message.version)
        return pb.ModelConfigResponse(config=model.config)

    async def model_statistics(self, message: pb.ModelStatisticsRequest, caller: Caller) -> pb.ModelStatisticsResponse:
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

    # ---- the model repository --------------------------------------------------------------

    async def repository_index(self, message: pb.RepositoryIndexRequest, caller: Caller) -> pb.RepositoryIndexResponse:
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

    async def load_model(
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

    async def repository_model_load(self, stream: Stream[Any, pb.RepositoryModelLoadResponse]) -> None:
        """Serve a call of `load_model`. A handler of its own: grpclib and protobuf would copy the files."""
        with translated_errors("RepositoryModelLoadRequest"):
            call = cast("HandlerCall", stream_of(stream))
            buffers: list[ReceiveBuffer] = []
            try:
                call.receive_large_messages_in(lambda start, byte_size: self._buffer(byte_size, buffers))
                message = await call.receive_message()
                if message is None:
                    raise GRPCError(Status.UNIMPLEMENTED, "the call ended without a request message")
                response = await self.load_model(*parse_load_request(message))
            finally:
                for buffer in buffers:
                    buffer.release()
            await stream.send_message(response)

    def _buffer(self, byte_size: int, buffers: list[ReceiveBuffer]) -> memoryview:
        """Return memory for a large message. Raises `ArenaFull`."""
        buffers.append(self._kernel.message_buffer(byte_size))
        return buffers[-1].view

    async def repository_model_unload(
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

    # ---- settings: changes those that the request names, and returns all of them -----------

    def _check_admin(self, caller: Caller) -> None:
        """Raise `Unavailable`, as for a restricted protocol, unless this client may administer the server."""
        refusal = self._admin.refusal(caller.header, caller.peer)
        if refusal is not None:
            raise Unavailable(refusal)

    async def trace_setting(self, message: pb.TraceSettingRequest, caller: Caller) -> pb.TraceSettingResponse:
        """Change and return the settings of a model, or of the server for an empty name."""
        if message.settings:
            self._check_admin(caller)
        if message.model_name:
            check_traced_model(self._kernel, message.model_name)
        change: TraceChange = {}
        for name in _TRACE_SETTINGS:
            if name in message.settings:
                texts = list(message.settings[name].value)
                # Without values a setting is cleared; the file cannot even be cleared.
                change[name] = texts or (None if name != "trace_file" else [""])
        if change:
            values = self._kernel.trace.update(change, message.model_name, got="got: ")
        else:
            values = self._kernel.trace.get(message.model_name)
        response = pb.TraceSettingResponse()
        for name, texts in values.as_dict().items():
            response.settings[name].value.extend(texts)
        return response

    async def log_settings(self, message: pb.LogSettingsRequest, caller: Caller) -> pb.LogSettingsResponse:
        if message.settings:
            self._check_admin(caller)
        change = _log_change(message)
        values = self._kernel.log.update(change) if change else self._kernel.log.values
        response = pb.LogSettingsResponse()
        for name, value in msgspec.structs.asdict(values).items():
            setting = response.settings[name]
            match value:
                case bool():
                    setting.bool_param = value
                case int():
                    setting.uint32_param = value
                case _:
                    setting.string_param = value
        return response

    # ---- shared memory: who may change and list regions is the kernel's setting ------------

    async def system_shared_memory_status(
        self, message: pb.SystemSharedMemoryStatusRequest, caller: Caller
    ) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._kernel.regions.status(RegionKind.SYSTEM, message.name, caller.identity):
            entry = response.regions[region.name]
            entry.name, entry.key = region.name, region.key
            entry.offset, entry.byte_size = region.offset, region.byte_size
        return response

    async def system_shared_memory_register(
        self, message: pb.SystemSharedMemoryRegisterRequest, caller: Caller
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._kernel.check_client_shm(local_peer=caller.local)
        self._kernel.regions.register_system(
            message.name, message.key, message.offset, message.byte_size, caller.identity
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(
        self, message: pb.SystemSharedMemoryUnregisterRequest, caller: Caller
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Forget a region, or all for an empty name."""
        self._kernel.check_client_shm(local_peer=caller.local)
        self._kernel.regions.unregister(RegionKind.SYSTEM, message.name, caller.identity)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(
        self, message: pb.CudaSharedMemoryStatusRequest, caller: Caller
    ) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._kernel.regions.status(RegionKind.CUDA, message.name, caller.identity):
            entry = response.regions[region.name]
            entry.name, entry.device_id, entry.byte_size = region.name, region.device_id, region.byte_size
        return response

    async def cuda_shared_memory_register(
        self, message: pb.CudaSharedMemoryRegisterRequest, caller: Caller
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._kernel.check_client_shm(local_peer=caller.local)
        await self._kernel.regions.register_cuda(
            message.name, message.raw_handle, message.device_id, message.byte_size, caller.identity
        )
        return pb.CudaSharedMemoryRegisterResponse()

    async def cuda_shared_memory_unregister(
        self, message: pb.CudaSharedMemoryUnregisterRequest, caller: Caller
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Forget a region, or all for an empty name."""
        self._kernel.check_client_shm(local_peer=caller.local)
        self._kernel.regions.unregister(RegionKind.CUDA, message.name, caller.identity)
        return pb.CudaSharedMemoryUnregisterResponse()


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


def parse_load_request(message: Buffer) -> tuple[RepositoryModelLoadRequest, dict[str, memoryview]]:
    """Return the request without its large files, and those by their keys, as views of `message`.

    Raises `InvalidArgument` for too many parameters or bytes that are no file, and protobuf's `DecodeError`.
    """
    view = memoryview(message)
    rest: list[memoryview] = []
    files: dict[str, memoryview] = {}
    #: How many fields of the rest came before each large file: of parameters with one key the last one counts.
    fields_before: dict[str, int] = {}
    rest_size = 0
    for count, field in enumerate(fields_of(view, MAX_LOOP_FIELDS), 1):
        check_count("parameters", count - _OTHER_FIELDS)
        if field.number == _PARAMETER and field.has_length and field.end - field.start > _SMALL_BYTE_SIZE:
            found = _large_file(view[field.start : field.end])
            if found is not None:
                files[found[0]] = found[1]
                fields_before[found[0]] = len(rest)
                continue
        rest_size += field.end - field.begin
        if rest_size > _MAX_BYTE_SIZE:
            raise InvalidArgument(
                f"the names and parameters of the load request that are no files take more than {_MAX_BYTE_SIZE} bytes"
            )
        rest.append(view[field.begin : field.end])
    request = RepositoryModelLoadRequest.FromString(b"".join(rest))
    for key in files.keys() & request.parameters.keys():
        later = RepositoryModelLoadRequest.FromString(b"".join(rest[fields_before[key] :]))
        if key in later.parameters:
            del files[key]
        else:
            del request.parameters[key]
    return request, files


def _large_file(parameter: memoryview) -> tuple[str, memoryview] | None:
    """Return key and content of a parameter with bytes; None for any other, which protobuf parses."""
    key, value = _single(parameter, _KEY), _single(parameter, _VALUE)
    if key is None or value is None:
        return None
    content = _single(parameter[value.start : value.end], _BYTES)
    if content is None:
        return None
    try:
        name = str(parameter[key.start : key.end], "utf-8")
    except UnicodeDecodeError:
        raise DecodeError("a key that is not UTF-8") from None
    return name, parameter[value.start : value.end][content.start : content.end]


def _single(message: memoryview, number: int) -> MessageField | None:
    """Return the only field with this number, None if there is none, several, or more of them than one of each."""
    found = None
    for index, field in enumerate(fields_of(message, MAX_LOOP_FIELDS)):
        if index > 1:
            return None
        if field.number == number:
            if found is not None or not field.has_length:
                return None
            found = field
    return found


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


def _log_change(message: pb.LogSettingsRequest) -> dict[str, bool | int | str]:
    change: dict[str, bool | int | str] = {}
    if "log_file" in message.settings:
        change["log_file"] = message.settings["log_file"].string_param
    for name, field, kind in _LOG_SETTINGS:
        if name not in message.settings:
            continue
        setting = message.settings[name]
        match setting.WhichOneof("parameter_choice"):
            case "bool_param" if field == "bool_param":
                change[name] = setting.bool_param
            case "uint32_param" if field == "uint32_param":
                change[name] = setting.uint32_param
            case "string_param" if field == "string_param":
                change[name] = setting.string_param
            case _:
                raise InvalidArgument(f"expect {kind} for '{name}'")
    return change
