"""`Response` to the body of an inference response: a JSON header, behind which binary outputs lie. Pure."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.serving.response import ParameterValue  # noqa: TC001 - msgspec reads it
from protocols.http.json.document import ABSENT
from protocols.http.json.tensor import json_values
from shm.datatypes import element_count

if TYPE_CHECKING:
    from kernel.serving.response import Response
    from protocols.http.inference.decoding import OutputFormat
    from shm.tensor import Buffer, Tensor


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] | msgspec.UnsetType = ABSENT
    data: list[Any] | msgspec.Raw | msgspec.UnsetType = ABSENT


class _InferResponse(msgspec.Struct, kw_only=True):
    id: str | msgspec.UnsetType = ABSENT
    model_name: str
    model_version: str
    parameters: dict[str, ParameterValue] | msgspec.UnsetType = ABSENT
    outputs: list[_Output | msgspec.Raw]


_encoder = msgspec.json.Encoder()


class EncodedResponse(msgspec.Struct, frozen=True):
    """A response body: the JSON `header` and the buffers behind it, which belong to the response still."""

    header: bytes
    binary: list[Buffer]

    @property
    def has_binary(self) -> bool:
        """Whether anything stands behind the header."""
        for buffer in self.binary:  # noqa: SIM110  # `any` would make a generator for every response
            if len(buffer):
                return True
        return False

    def join(self) -> bytes:
        """Return the body in one piece, independent of the response."""
        return b"".join((self.header, *self.binary)) if self.binary else self.header


def encode_infer(response: Response, output_format: OutputFormat, *, plain_only: bool = False) -> EncodedResponse:
    """Encode a response with outputs; the caller releases it afterwards.

    Raises `ServingError` for what JSON cannot carry, and if `plain_only`, `NeedsCare` for NaN and the like.
    """
    binary: list[Buffer] = []
    outputs = [
        _encode_output(output, output_format, binary, plain_only=plain_only) for output in response.outputs or ()
    ]
    return EncodedResponse(_encode(response, outputs), binary)


def json_around_data(response: Response) -> list[bytes]:
    """Return the pieces of JSON around the data of those outputs of `response` that are in its body, all in JSON."""
    # msgspec writes no control character itself.
    outputs: list[_Output | msgspec.Raw] = [
        _Output(output.name, output.datatype, output.shape)
        if output.response_bytes() is None
        else _Output(output.name, output.datatype, output.shape, data=msgspec.Raw(b"\0"))
        for output in response.outputs or ()
    ]
    return _encode(response, outputs).split(b"\0")


def _encode(response: Response, outputs: list[_Output | msgspec.Raw]) -> bytes:
    return _encoder.encode(
        _InferResponse(
            id=response.id or ABSENT,
            model_name=response.model_name,
            model_version=response.model_version,
            parameters=response.parameters or ABSENT,
            outputs=outputs,
        )
    )


def _encode_output(
    output: Tensor, output_format: OutputFormat, binary: list[Buffer], *, plain_only: bool
) -> _Output | msgspec.Raw:
    """Return the JSON of `output`; its bytes go to `binary` where they are not part of the JSON."""
    data = output.response_bytes()
    if data is None:  # it is in the client's region
        return _Output(output.name, output.datatype, output.shape)
    if output_format.is_binary(output.name):
        binary.append(data)
        return _binary_output(output.name, output.datatype, len(data), *output.shape)
    count = element_count(output.shape)
    values = json_values(output.name, output.datatype, data, count, plain_only=plain_only)
    return _Output(output.name, output.datatype, output.shape, data=values)


@functools.lru_cache(maxsize=1024)
def _binary_output(name: str, datatype: str, byte_size: int, *shape: int) -> msgspec.Raw:
    """Return the JSON of a binary output, which responses repeat."""
    return msgspec.Raw(_encoder.encode(_Output(name, datatype, list(shape), {"binary_data_size": byte_size})))
