"""Sends recorded requests over HTTP, for `naiad replay`. Tensors are binary."""

from __future__ import annotations

import os
import urllib.parse
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from kernel.records.replay_target import (
    ReplayedOutput,
    ReplayedResponse,
    ReplayFailed,
    TargetLost,
    infer_parameters,
)

if TYPE_CHECKING:
    from kernel.records.recording_format import RequestRecord

_HEADER_LENGTH = "Inference-Header-Content-Length"

#: Seconds for a connection.
_CONNECT_S = 10


class HttpReplayTarget:
    """A server's HTTP port. A `kernel.records.replay_target.ReplayTarget`."""

    takes_decoupled = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=True,
        )

    async def check(self) -> None:
        try:
            async with self._session.get(f"{self._url}/v2") as response:
                msgspec.json.decode(await response.read())
                status = response.status
        except (aiohttp.ClientError, OSError) as error:
            raise ReplayFailed(f"no inference server responds to HTTP at {self._url}: {_reason(error)}") from None
        except ValueError:
            status = 0
        if status != 200:
            raise ReplayFailed(f"what responds to HTTP at {self._url} is no inference server: GET /v2 is not there")

    async def close(self) -> None:
        await self._session.close()

    async def serves(self, model: str) -> bool:
        url = f"{self._url}/v2/models/{urllib.parse.quote(model, safe='')}/ready"
        try:
            async with self._session.get(url) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError) as error:
            raise TargetLost(f"the connection failed: {_reason(error)}") from None

    async def send(self, request: RequestRecord) -> list[ReplayedResponse]:
        header, data = encode_infer_request(request)
        url = f"{self._url}{infer_path(request)}"
        headers = {_HEADER_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}
        try:
            async with self._session.post(url, data=header + data, headers=headers) as response:
                body = await response.read()
                length = response.headers.get(_HEADER_LENGTH)
        except (aiohttp.ClientError, OSError) as error:
            raise TargetLost(f"the connection failed: {_reason(error)}") from None
        return [decode_infer_response(body, len(body) if length is None else int(length))]


def _reason(error: aiohttp.ClientError | OSError) -> str:
    """Return why a connection failed, without the address."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = getattr(cause, "errno", None) or 0
    if number > 0:
        return os.strerror(number)
    return getattr(cause, "strerror", None) or str(error) or type(error).__name__


def infer_path(request: RequestRecord) -> str:
    """Return the path of the request's model, with the version that the client asked for."""
    path = f"/v2/models/{urllib.parse.quote(request.model, safe='')}"
    return f"{path}/versions/{request.wanted_version}/infer" if request.wanted_version else f"{path}/infer"


def encode_infer_request(request: RequestRecord) -> tuple[bytes, bytes]:
    """Return the JSON and the tensors of a request. All outputs are asked for in the response, as binary."""
    inputs, data = [], []
    for tensor in request.inputs:
        entry: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype}
        entry["parameters"] = {"binary_data_size": tensor.byte_size}
        inputs.append(entry)
        data.append(tensor.data or b"")
    message: dict[str, Any] = {"inputs": inputs}
    if request.id:
        message["id"] = request.id
    parameters = infer_parameters(request)
    if request.outputs:
        message["outputs"] = []
        for output in request.outputs:
            of_output: dict[str, Any] = {"binary_data": True}
            if output.classification:
                of_output["classification"] = output.classification
            message["outputs"].append({"name": output.name, "parameters": of_output})
    else:
        parameters["binary_data_output"] = True
    if parameters:
        message["parameters"] = parameters
    return msgspec.json.encode(message), b"".join(data)


def decode_infer_response(body: bytes, header_length: int) -> ReplayedResponse:
    """Return a response whose JSON has `header_length` bytes. Raises `ReplayFailed`."""
    try:
        message = msgspec.json.decode(body[:header_length])
        if "error" in message:
            return ReplayedResponse(error=str(message["error"]))
        outputs, position = [], header_length
        for output in message["outputs"]:
            byte_size = output["parameters"]["binary_data_size"]
            data = body[position : position + byte_size]
            position += byte_size
            outputs.append(ReplayedOutput(output["name"], output["datatype"], output["shape"], data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
        raise ReplayFailed(f"the response is not that of an inference server with binary tensors: {error!r}") from None
    return ReplayedResponse(outputs)
