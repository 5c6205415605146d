"""gRPC for `naiad infer`: a `kernel.command.infer.server.InferServer`, whose requests go over ModelStreamInfer.

A stream takes requests to every model, also to those that send any number of responses.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import TYPE_CHECKING, Any, TypeVar

from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
from grpclib.config import Configuration
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from kernel.command.infer.connection import ClientError
from kernel.config.to_json import to_dict
from protocols.grpc.generated import grpc_service_pb2 as messages

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterator

    from kernel.command.infer.arguments import GivenInput

_SERVICE = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

#: What the server may send before this program has read it, for each call and for all.
_WINDOW = 64 << 20

#: How long a response may take, in seconds.
_TIMEOUT_S = 300

_Found = TypeVar("_Found")


def connect(host: str, port: int, *, tls: bool, model: str, version: str) -> GrpcInferServer:
    """Return a model of the server at a gRPC port."""
    return GrpcInferServer(host, port, tls=tls, model=model, version=version)


class GrpcInferServer:
    """A gRPC port and a model of it. It has an event loop of its own, which runs only within its methods."""

    def __init__(self, host: str, port: int, *, tls: bool, model: str, version: str) -> None:
        self._address = f"{host}:{port}"
        self._model, self._version = model, version
        self._runner = asyncio.Runner()
        self._channel = self._runner.run(_open_channel(host, port, tls=tls))
        #: The responses of the request in flight.
        self._stream: AsyncGenerator[messages.ModelInferResponse, None] | None = None

    def metadata(self) -> dict[str, Any]:
        request = messages.ModelMetadataRequest(name=self._model, version=self._version)
        found = self._run(self._call("ModelMetadata", request, messages.ModelMetadataResponse))
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
        found = self._run(self._call("ModelConfig", request, messages.ModelConfigResponse))
        return to_dict(found.config)

    def model_names(self) -> list[str]:
        request = messages.RepositoryIndexRequest(ready=True)
        found = self._run(self._call("RepositoryIndex", request, messages.RepositoryIndexResponse))
        return sorted({each.name for each in found.models})

    def responses(
        self, inputs: list[GivenInput], outputs: list[dict[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], bytes]]:
        self._stream = self._responses(encode_request(self._model, self._version, inputs, outputs))
        while (response := self._run(self._next())) is not None:
            yield decode_response(response)

    def close(self) -> None:
        """See `InferServer`. A request in flight is cancelled."""
        try:
            if self._stream is not None:
                self._runner.run(self._stream.aclose())
            self._channel.close()
        finally:
            self._runner.close()

    def _run(self, coroutine: Coroutine[Any, Any, _Found]) -> _Found:
        """Return what a coroutine returns. Raises every error of the connection and of gRPC as `ClientError`."""
        try:
            return self._runner.run(coroutine)
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

    async def _call(self, name: str, request: Any, response: type[_Found]) -> _Found:
        method: Any = UnaryUnaryMethod(self._channel, f"/{_SERVICE}/{name}", type(request), response)
        found: _Found = await method(request, timeout=_TIMEOUT_S)
        return found

    async def _next(self) -> messages.ModelInferResponse | None:
        """Return the next response; None after the last one."""
        assert self._stream is not None
        async with asyncio.timeout(_TIMEOUT_S):
            return await anext(self._stream, None)

    async def _responses(
        self, request: messages.ModelInferRequest
    ) -> AsyncGenerator[messages.ModelInferResponse, None]:
        method: Any = StreamStreamMethod(
            self._channel, f"/{_SERVICE}/ModelStreamInfer", messages.ModelInferRequest,
            messages.ModelStreamInferResponse,
        )  # fmt: skip
        async with method.open() as stream:
            await stream.send_message(request, end=True)
            async for message in stream:
                if message.error_message:
                    raise ClientError(message.error_message)
                yield message.infer_response


async def _open_channel(host: str, port: int, *, tls: bool) -> Channel:
    """Return a channel of the running event loop. It connects with its first call."""
    secure = ssl.create_default_context() if tls else None
    if secure is not None:
        secure.set_alpn_protocols(["h2"])
    config = Configuration(http2_connection_window_size=_WINDOW, http2_stream_window_size=_WINDOW)
    return Channel(host, port, ssl=secure, config=config)


def encode_request(
    model: str, version: str, inputs: list[GivenInput], outputs: list[dict[str, Any]]
) -> messages.ModelInferRequest:
    """Return the message of a request; `outputs` are those of the JSON of HTTP."""
    request = messages.ModelInferRequest(model_name=model, model_version=version)
    for tensor in inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw)
    for output in outputs:
        wanted = request.outputs.add(name=output["name"])
        if "classification" in output["parameters"]:
            wanted.parameters["classification"].int64_param = output["parameters"]["classification"]
    return request


def decode_response(response: messages.ModelInferResponse) -> tuple[dict[str, Any], bytes]:
    """Return a response as HTTP has it: the JSON, and the raw bytes behind it. Raises `ClientError`."""
    raws = response.raw_output_contents
    if len(raws) != len(response.outputs):
        raise ClientError("the response has outputs that are not in raw_output_contents")
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


def _value(parameter: messages.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)
