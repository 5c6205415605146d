"""gRPC for `naiad bench`: a `kernel.command.bench.target.BenchTarget`. The load itself has its own client."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, TypeVar

import hpack
from grpclib.client import StreamStreamMethod, UnaryUnaryMethod

from kernel.command.bench.requests import PLACEHOLDER_ID, cut_at_id, parameters_of, span_parameters
from kernel.command.bench.target import FoundOutput
from kernel.command.infer.connection import ClientError
from protocols.clients.grpc_infer import GrpcInferServer
from protocols.grpc.generated import grpc_service_pb2 as messages
from protocols.load.grpc_state import sequence_id_bytes

if TYPE_CHECKING:
    from kernel.command.bench.requests import BenchRequest
    from kernel.command.bench.target import TargetSettings

_SERVICE = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_PREFIX = struct.Struct(">BL")
_TIMEOUT_S = 300

_Found = TypeVar("_Found")

_STATISTICS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


def connect(label: str, host: str, port: int, settings: TargetSettings) -> GrpcBenchTarget:
    """Return a model of the server at a gRPC port."""
    return GrpcBenchTarget(label, host, port, settings)


class GrpcBenchTarget(GrpcInferServer):
    """A server's gRPC port."""

    protocol = "grpc"

    def __init__(self, label: str, host: str, port: int, settings: TargetSettings) -> None:
        super().__init__(host, port, tls=False, model=settings.model, version=settings.version)
        self.label, self.host, self.port = label, host, port
        self._settings = settings

    def server(self) -> dict[str, Any]:
        request = messages.ServerMetadataRequest()
        found = self._run(self._call("ServerMetadata", request, messages.ServerMetadataResponse))
        return {"name": found.name, "version": found.version, "extensions": list(found.extensions)}

    def config(self) -> dict[str, Any] | None:  # type: ignore[override]
        try:
            return super().config()
        except ClientError:
            return None

    def statistics(self) -> list[dict[str, Any]] | None:
        request = messages.ModelStatisticsRequest(name=self._settings.model, version=self._settings.version)
        try:
            found = self._run(self._call("ModelStatistics", request, messages.ModelStatisticsResponse))
        except ClientError:
            return None
        return [
            {
                "version": each.version,
                "inference_count": each.inference_count,
                "execution_count": each.execution_count,
                "inference_stats": {
                    name: {"count": part.count, "ns": part.ns}
                    for name in _STATISTICS
                    for part in (getattr(each.inference_stats, name),)
                },
            }
            for each in found.model_stats
        ]

    def head(self) -> bytes:
        encoder = hpack.Encoder()
        encoder.header_table_size = 0
        call = "ModelStreamInfer" if self._settings.streaming else "ModelInfer"
        headers = [
            (":method", "POST"), (":scheme", "http"), (":path", f"/{_SERVICE}/{call}"),
            (":authority", f"{self.host}:{self.port}"), ("te", "trailers"), ("content-type", "application/grpc"),
            ("user-agent", "naiad-bench"),
        ]  # fmt: skip
        return encoder.encode([*headers, *((name.lower(), value) for name, value in self._settings.headers.items())])

    def encode(self, request: BenchRequest) -> list[bytes]:
        encoded = encode_message(request).SerializeToString()
        framed = _PREFIX.pack(0, len(encoded)) + encoded
        if request.sequence is None:
            return [framed]
        return cut_at_id(framed, sequence_id_bytes(PLACEHOLDER_ID))

    def probe(self, parts: list[bytes]) -> list[FoundOutput]:
        encoded = sequence_id_bytes(PLACEHOLDER_ID).join(parts)
        request = messages.ModelInferRequest.FromString(encoded[_PREFIX.size :])
        if self._settings.streaming:
            response = self._run(self._first_response(request))
        else:
            response = self._run(self._call("ModelInfer", request, messages.ModelInferResponse))
        raws = list(response.raw_output_contents)
        return [
            FoundOutput(
                output.name, output.datatype, list(output.shape),
                len(raws[index]) if index < len(raws) and "shared_memory_region" not in output.parameters else None,
            )
            for index, output in enumerate(response.outputs)
        ]  # fmt: skip

    async def _first_response(self, request: messages.ModelInferRequest) -> messages.ModelInferResponse:
        method: Any = StreamStreamMethod(
            self._channel, f"/{_SERVICE}/ModelStreamInfer", messages.ModelInferRequest,
            messages.ModelStreamInferResponse,
        )  # fmt: skip
        found: messages.ModelInferResponse | None = None
        async with method.open(timeout=_TIMEOUT_S, metadata=self._lower_headers()) as stream:
            await stream.send_message(request, end=True)
            async for message in stream:
                if message.error_message:
                    raise ClientError(f"the server returned an error on the stream: {message.error_message}")
                if found is None or not found.outputs:
                    found = message.infer_response
        return found if found is not None else messages.ModelInferResponse()

    def register(self, name: str, key: str, byte_size: int) -> None:
        request = messages.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=byte_size)
        self._run(self._call("SystemSharedMemoryRegister", request, messages.SystemSharedMemoryRegisterResponse))

    def unregister(self, name: str) -> None:
        request = messages.SystemSharedMemoryUnregisterRequest(name=name)
        self._run(self._call("SystemSharedMemoryUnregister", request, messages.SystemSharedMemoryUnregisterResponse))

    def load(self, config: dict[str, Any] | None) -> None:
        request = messages.RepositoryModelLoadRequest(model_name=self._settings.model)
        if config is not None:
            request.parameters["config"].string_param = json.dumps(config)
        self._run(self._call("RepositoryModelLoad", request, messages.RepositoryModelLoadResponse))

    async def _call(self, name: str, request: Any, response: type[_Found]) -> _Found:
        method: Any = UnaryUnaryMethod(self._channel, f"/{_SERVICE}/{name}", type(request), response)
        found: _Found = await method(request, timeout=_TIMEOUT_S, metadata=self._lower_headers())
        return found

    def _lower_headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self._settings.headers.items()}


def encode_message(request: BenchRequest) -> messages.ModelInferRequest:
    """Return the message of a request. The server sends all outputs."""
    message = messages.ModelInferRequest(model_name=request.model, model_version=request.version)
    for tensor in request.inputs:
        given = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if tensor.span is None:
            message.raw_input_contents.append(tensor.raw)
        else:
            _set_all(given.parameters, span_parameters(tensor.span))
    for output in request.outputs:
        _set_all(message.outputs.add(name=output.name).parameters, span_parameters(output.span))
    _set_all(message.parameters, parameters_of(request))
    return message


def _set_all(parameters: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, bool):
            parameters[name].bool_param = value
        elif isinstance(value, int):
            parameters[name].int64_param = value
        else:
            parameters[name].string_param = str(value)
