"""The gRPC clients of `naiad infer`, `naiad bench` and `naiad replay`, over one `_Port`.

Clients of `infer` and `replay` send requests over ModelStreamInfer where a model may respond any number of times. For
`bench` it asks for metadata and sends one request that is read; the load itself has its own client (`grpc_load.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import struct
import urllib.parse
from typing import TYPE_CHECKING, Any, TypeVar

import hpack
from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
from grpclib.config import Configuration
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from kernel.config.to_text import to_dict
from kernel.records.replay_target import (
    ReplayedOutput,
    ReplayedResponse,
    ReplayFailed,
    TargetLost,
    infer_parameters,
)
from kernel.tools.bench.requests import PLACEHOLDER_ID, cut_at_id, parameters_of, span_parameters
from kernel.tools.bench.target import FoundOutput
from kernel.tools.client import ClientError
from protocols.clients.grpc_load import sequence_id_bytes
from protocols.grpc.generated import grpc_service_pb2 as messages

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping

    from kernel.records.recording_format import RequestRecord
    from kernel.tools.bench.requests import BenchRequest
    from kernel.tools.bench.target import TargetSettings
    from kernel.tools.infer_arguments import GivenInput

_SERVICE = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

#: What the server may send before this program has read it, for each call and for all.
_WINDOW = 64 << 20

#: How long a response may take, in seconds.
_TIMEOUT_S = 300

_PREFIX = struct.Struct(">BL")

_STATISTICS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")

_MAX_INT64 = (1 << 63) - 1

_Found = TypeVar("_Found")

if TYPE_CHECKING:
    _Responses = AsyncGenerator[messages.ModelStreamInferResponse, None]


class _Port:
    """A connection to a gRPC port, made in a running event loop. It connects with its first call."""

    def __init__(self, host: str | None, port: int, *, tls: bool, headers: Mapping[str, str] | None = None) -> None:
        """`headers` are sent with each call."""
        secure = ssl.create_default_context() if tls else None
        if secure is not None:
            secure.set_alpn_protocols(["h2"])
        config = Configuration(http2_connection_window_size=_WINDOW, http2_stream_window_size=_WINDOW)
        self._channel = Channel(host, port, ssl=secure, config=config)
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}

    async def call(self, request: Any, response: type[_Found], timeout_s: float | None = None) -> _Found:
        """Return the response to `request`: of the RPC that its type is named after."""
        path = f"/{_SERVICE}/{request.DESCRIPTOR.name.removesuffix('Request')}"
        method: Any = UnaryUnaryMethod(self._channel, path, type(request), response)
        found: _Found = await method(request, timeout=timeout_s, metadata=self._headers)
        return found

    async def stream(self, request: messages.ModelInferRequest, timeout_s: float | None = None) -> _Responses:
        """Yield the responses to one request on a stream."""
        method: Any = StreamStreamMethod(
            self._channel, f"/{_SERVICE}/ModelStreamInfer", type(request), messages.ModelStreamInferResponse
        )
        async with method.open(timeout=timeout_s, metadata=self._headers) as stream:
            await stream.send_message(request, end=True)
            async for message in stream:
                yield message

    def close(self) -> None:
        self._channel.close()


async def _open(host: str, port: int, *, tls: bool, headers: Mapping[str, str] | None) -> _Port:
    return _Port(host, port, tls=tls, headers=headers)


class GrpcInferServer:
    """A gRPC port and a model of it. It has an event loop of its own, which runs only within its methods."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: bool,
        model: str,
        version: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._address = f"{host}:{port}"
        self._model, self._version = model, version
        self._runner = asyncio.Runner()
        self._port = self._runner.run(_open(host, port, tls=tls, headers=headers))
        #: The responses of the request in flight.
        self._stream: _Responses | None = None

    def metadata(self) -> dict[str, Any]:
        request = messages.ModelMetadataRequest(name=self._model, version=self._version)
        found = self._call(request, messages.ModelMetadataResponse)
        return {
            "name": found.name,
            **{
                kind: [
                    {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)}
                    for each in getattr(found, kind)
                ]
                for kind in ("inputs", "outputs")
            },
        }

    def config(self) -> dict[str, Any]:
        request = messages.ModelConfigRequest(name=self._model, version=self._version)
        return to_dict(self._call(request, messages.ModelConfigResponse).config)

    def model_names(self) -> list[str]:
        found = self._call(messages.RepositoryIndexRequest(ready=True), messages.RepositoryIndexResponse)
        return sorted({each.name for each in found.models})

    def responses(
        self, inputs: list[GivenInput], outputs: list[dict[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], bytes]]:
        self._stream = self._port.stream(encode_request(self._model, self._version, inputs, outputs))
        while (message := self._run(self._next(self._stream))) is not None:
            if message.error_message:
                raise ClientError(message.error_message)
            yield decode_response(message.infer_response)

    async def _next(self, responses: _Responses) -> messages.ModelStreamInferResponse | None:
        """Return the next response; None after the last one."""
        async with asyncio.timeout(_TIMEOUT_S):
            return await anext(responses, None)

    def close(self) -> None:
        """Close the connection. A request in flight is cancelled."""
        try:
            self._runner.run(self._end_stream())
            self._port.close()
        finally:
            self._runner.close()

    async def _end_stream(self) -> None:
        """End the stream of the request in flight, if there is one."""
        # Control-C between two steps of `Runner.run` leaves a task that it made and has not run: it reads the stream.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._stream is not None:
            await self._stream.aclose()

    def _call(self, request: Any, response: type[_Found]) -> _Found:
        return self._run(self._port.call(request, response, _TIMEOUT_S))

    def _run(self, coroutine: Coroutine[Any, Any, _Found]) -> _Found:
        """Return what a coroutine returns. Raises every error of the connection and of gRPC as `ClientError`."""
        try:
            return self._runner.run(coroutine)
        except asyncio.CancelledError:
            # Nothing else cancels: Control-C came before `Runner.run` counted it.
            raise KeyboardInterrupt from None
        except GRPCError as error:
            raise ClientError(f"the server returned {error.status.name}: {error.message or 'no reason'}") from None
        except TimeoutError:
            raise ClientError(f"{self._address} has not responded within {_TIMEOUT_S} s") from None
        except (StreamTerminatedError, ProtocolError) as error:
            raise ClientError(f"{self._address} has ended the connection: {error or 'no reason'}") from None
        except OSError as error:
            # asyncio puts the address into the place of the text of the system.
            text = os.strerror(error.errno) if isinstance(error, ConnectionError) and error.errno else error
            raise ClientError(
                f"no server responds to gRPC at {self._address}: {text}. Start one with "
                "'naiad run', or give the address of another with --url"
            ) from None


def encode_request(
    model: str, version: str, inputs: list[GivenInput], outputs: list[dict[str, Any]]
) -> messages.ModelInferRequest:
    """Return the message of a request; `outputs` are as in the JSON of HTTP."""
    request = messages.ModelInferRequest(model_name=model, model_version=version)
    for tensor in inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw)
    for output in outputs:
        _add_output(request, output["name"], output["parameters"].get("classification"))
    return request


def decode_response(response: messages.ModelInferResponse) -> tuple[dict[str, Any], bytes]:
    """Return a response as HTTP has it: the JSON, and the raw bytes behind it. Raises `ClientError`."""
    raws = response.raw_output_contents
    if len(raws) != len(response.outputs):
        raise ClientError(_WITHOUT_RAW)
    outputs = [
        {
            "name": output.name,
            "datatype": output.datatype,
            "shape": list(output.shape),
            "parameters": {"binary_data_size": len(raw)},
        }
        for output, raw in zip(response.outputs, raws, strict=True)
    ]
    head: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        head["parameters"] = {name: _value(each) for name, each in response.parameters.items()}
    return {**head, "outputs": outputs}, b"".join(raws)


_WITHOUT_RAW = "the response has outputs that are not in raw_output_contents"


def _value(parameter: messages.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def _add_output(request: messages.ModelInferRequest, name: str, classes: int | None) -> None:
    output = request.outputs.add(name=name)
    if classes:
        output.parameters["classification"].int64_param = classes


def _set_all(parameters: Any, values: Mapping[str, str | int | bool | float]) -> None:
    """Set parameters of a message, each in the field of its type."""
    for name, value in values.items():
        parameter = parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            if value > _MAX_INT64:
                parameter.uint64_param = value
            else:
                parameter.int64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = value


# ---- naiad bench ----------------------------------------------------------------------------


class GrpcBenchTarget(GrpcInferServer):
    """A server's gRPC port. A `kernel.tools.bench.target.BenchTarget`."""

    protocol = "grpc"

    def __init__(self, label: str, host: str, port: int, settings: TargetSettings) -> None:
        super().__init__(
            host, port, tls=False, model=settings.model, version=settings.version, headers=settings.headers
        )
        self.label, self.host, self.port = label, host, port
        self._settings = settings

    def server(self) -> dict[str, Any]:
        found = self._call(messages.ServerMetadataRequest(), messages.ServerMetadataResponse)
        return {"name": found.name, "version": found.version, "extensions": list(found.extensions)}

    def config(self) -> dict[str, Any] | None:  # type: ignore[override]
        try:
            return super().config()
        except ClientError:
            return None

    def statistics(self) -> list[dict[str, Any]] | None:
        request = messages.ModelStatisticsRequest(name=self._model, version=self._version)
        try:
            found = self._call(request, messages.ModelStatisticsResponse)
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
            response = self._call(request, messages.ModelInferResponse)
        raws = list(response.raw_output_contents)
        return [
            FoundOutput(
                output.name, output.datatype, list(output.shape),
                len(raws[index]) if index < len(raws) and "shared_memory_region" not in output.parameters else None,
            )
            for index, output in enumerate(response.outputs)
        ]  # fmt: skip

    async def _first_response(self, request: messages.ModelInferRequest) -> messages.ModelInferResponse:
        """Return the first response with outputs, after the last one has come."""
        found = messages.ModelInferResponse()
        async with contextlib.aclosing(self._port.stream(request, _TIMEOUT_S)) as responses:
            async for message in responses:
                if message.error_message:
                    raise ClientError(f"the server returned an error on the stream: {message.error_message}")
                if not found.outputs:
                    found = message.infer_response
        return found

    def register(self, name: str, key: str, byte_size: int) -> None:
        request = messages.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=byte_size)
        self._call(request, messages.SystemSharedMemoryRegisterResponse)

    def unregister(self, name: str) -> None:
        request = messages.SystemSharedMemoryUnregisterRequest(name=name)
        self._call(request, messages.SystemSharedMemoryUnregisterResponse)

    def load(self, config: dict[str, Any] | None) -> None:
        request = messages.RepositoryModelLoadRequest(model_name=self._model)
        if config is not None:
            request.parameters["config"].string_param = json.dumps(config)
        self._call(request, messages.RepositoryModelLoadResponse)


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


# ---- naiad replay ---------------------------------------------------------------------------


class GrpcReplayTarget:
    """A server's gRPC port. A `kernel.records.replay_target.ReplayTarget`."""

    takes_decoupled = True

    def __init__(self, url: str) -> None:
        self._url = url
        parts = urllib.parse.urlsplit(url)
        self._port = _Port(parts.hostname, parts.port or 8001, tls=parts.scheme == "https")

    async def check(self) -> None:
        try:
            await self._port.call(messages.ServerLiveRequest(), messages.ServerLiveResponse)
        except (GRPCError, StreamTerminatedError, OSError) as error:
            raise ReplayFailed(f"no inference server responds to gRPC at {self._url}: {error}") from None

    async def serves(self, model: str) -> bool:
        try:
            found = await self._port.call(messages.ModelReadyRequest(name=model), messages.ModelReadyResponse)
        except GRPCError:  # an unknown model
            return False
        except (StreamTerminatedError, OSError) as error:
            raise _lost(error) from None
        return found.ready

    async def close(self) -> None:
        self._port.close()

    async def send(self, request: RequestRecord) -> list[ReplayedResponse]:
        message = encode_model_infer(request)
        try:
            if request.decoupled:
                return [
                    ReplayedResponse(error=each.error_message)
                    if each.error_message
                    else decode_model_infer(each.infer_response)
                    async for each in self._port.stream(message)
                ]
            return [decode_model_infer(await self._port.call(message, messages.ModelInferResponse))]
        except GRPCError as error:
            return [ReplayedResponse(error=error.message or str(error.status))]
        except (StreamTerminatedError, OSError) as error:
            raise _lost(error) from None


def _lost(error: Exception) -> TargetLost:
    return TargetLost(f"the connection failed: {error or type(error).__name__}")


def encode_model_infer(request: RequestRecord) -> messages.ModelInferRequest:
    """Return the message of a request. All outputs are asked for in the response."""
    message = messages.ModelInferRequest(
        model_name=request.model, model_version=request.wanted_version, id=request.id
    )  # fmt: skip
    for tensor in request.inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data or b"")
    for wanted in request.outputs:
        _add_output(message, wanted.name, wanted.classification)
    _set_all(message.parameters, infer_parameters(request))
    return message


def decode_model_infer(message: messages.ModelInferResponse) -> ReplayedResponse:
    """Return a response with outputs."""
    if len(message.raw_output_contents) != len(message.outputs):
        raise ReplayFailed(_WITHOUT_RAW)
    return ReplayedResponse(
        [
            ReplayedOutput(output.name, output.datatype, list(output.shape), data)
            for output, data in zip(message.outputs, message.raw_output_contents, strict=True)
        ]
    )
