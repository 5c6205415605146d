"""Sends recorded requests over gRPC, for `naiad replay`: those to decoupled models on a stream of their own."""

from __future__ import annotations

import ssl
import urllib.parse
from typing import TYPE_CHECKING, Any

from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
from grpclib.config import Configuration
from grpclib.exceptions import GRPCError, StreamTerminatedError

from kernel.recording.replayed import ReplayedOutput, ReplayedResponse, ReplayFailed, TargetLost
from protocols.grpc.generated import grpc_service_pb2 as messages
from protocols.grpc.service import SERVICE

if TYPE_CHECKING:
    from kernel.recording.format import RequestRecord

_MAX_INT64 = (1 << 63) - 1

#: What the target may send before this program has read it, for each call and for all.
_WINDOW = 64 << 20


def connect(url: str) -> GrpcReplayTarget:
    """Return the server at `url`."""
    return GrpcReplayTarget(url)


class GrpcReplayTarget:
    """A server's gRPC port. A `kernel.recording.replayed.ReplayTarget`."""

    takes_decoupled = True

    def __init__(self, url: str) -> None:
        self._url = url
        parts = urllib.parse.urlsplit(url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        if secure is not None:
            secure.set_alpn_protocols(["h2"])
        config = Configuration(http2_connection_window_size=_WINDOW, http2_stream_window_size=_WINDOW)
        self._channel = Channel(parts.hostname, parts.port or 8001, ssl=secure, config=config)
        self._live: Any = UnaryUnaryMethod(
            self._channel, f"/{SERVICE}/ServerLive", messages.ServerLiveRequest, messages.ServerLiveResponse
        )
        self._ready: Any = UnaryUnaryMethod(
            self._channel, f"/{SERVICE}/ModelReady", messages.ModelReadyRequest, messages.ModelReadyResponse
        )
        self._infer: Any = UnaryUnaryMethod(
            self._channel, f"/{SERVICE}/ModelInfer", messages.ModelInferRequest, messages.ModelInferResponse
        )
        self._stream: Any = StreamStreamMethod(
            self._channel, f"/{SERVICE}/ModelStreamInfer", messages.ModelInferRequest,
            messages.ModelStreamInferResponse,
        )  # fmt: skip

    async def check(self) -> None:
        try:
            await self._live(messages.ServerLiveRequest())
        except (GRPCError, StreamTerminatedError, OSError) as error:
            raise ReplayFailed(f"no inference server responds to gRPC at {self._url}: {error}") from None

    async def serves(self, model: str) -> bool:
        try:
            return bool((await self._ready(messages.ModelReadyRequest(name=model))).ready)
        except GRPCError:  # an unknown model
            return False
        except (StreamTerminatedError, OSError) as error:
            raise TargetLost(f"the connection failed: {error or type(error).__name__}") from None

    async def close(self) -> None:
        self._channel.close()

    async def send(self, request: RequestRecord) -> list[ReplayedResponse]:
        message = encode_model_infer(request)
        try:
            if request.decoupled:
                return await self._send_on_stream(message)
            return [decode_model_infer(await self._infer(message))]
        except GRPCError as error:
            return [ReplayedResponse(error=error.message or str(error.status))]
        except (StreamTerminatedError, OSError) as error:
            raise TargetLost(f"the connection failed: {error or type(error).__name__}") from None

    async def _send_on_stream(self, message: messages.ModelInferRequest) -> list[ReplayedResponse]:
        found = []
        async with self._stream.open() as stream:
            await stream.send_message(message, end=True)
            async for response in stream:
                if response.error_message:
                    found.append(ReplayedResponse(error=response.error_message))
                else:
                    found.append(decode_model_infer(response.infer_response))
        return found


def encode_model_infer(request: RequestRecord) -> messages.ModelInferRequest:
    """Return the message of a request. All outputs are asked for in the response."""
    message = messages.ModelInferRequest(
        model_name=request.model, model_version=request.wanted_version, id=request.id
    )  # fmt: skip
    for tensor in request.inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data or b"")
    for wanted in request.outputs:
        output = message.outputs.add(name=wanted.name)
        if wanted.classification:
            output.parameters["classification"].int64_param = wanted.classification
    for name, value in request.parameters.items():
        _set(message, name, value)
    if request.sequence_id:
        _set(message, "sequence_id", request.sequence_id)
        _set(message, "sequence_start", request.sequence_start)
        _set(message, "sequence_end", request.sequence_end)
    if request.priority:
        _set(message, "priority", request.priority)
    if request.timeout_us:
        _set(message, "timeout", request.timeout_us)
    return message


def _set(message: messages.ModelInferRequest, name: str, value: str | int | bool | float) -> None:
    parameter = message.parameters[name]
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


def decode_model_infer(message: messages.ModelInferResponse) -> ReplayedResponse:
    """Return a response with outputs."""
    if len(message.raw_output_contents) != len(message.outputs):
        raise ReplayFailed("the response has outputs that are not in raw_output_contents")
    return ReplayedResponse(
        [
            ReplayedOutput(output.name, output.datatype, list(output.shape), data)
            for output, data in zip(message.outputs, message.raw_output_contents, strict=True)
        ]
    )
