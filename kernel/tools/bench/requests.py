"""The requests of `naiad bench`: their inputs, places for outputs, and their bytes over HTTP. Pure.

The bytes are made once, before the load. The id of a sequence is a number with as many bytes as every other, so that it
can be put into the bytes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.tools.client import model_path
from kernel.tools.elements import decode_elements
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: Ids of sequences are from here up to twice as much: 15 digits in JSON, seven bytes in protobuf.
FIRST_SEQUENCE_ID = 1 << 48

#: Stands for the id of a sequence until the bytes are cut there.
PLACEHOLDER_ID = 0x15A3C96E7B2D1

_HEADER_LENGTH = "Inference-Header-Content-Length"


class RegionSpan(msgspec.Struct, frozen=True):
    """Where a tensor is in a region of shared memory."""

    region: str
    offset: int
    byte_size: int


class BenchInput(msgspec.Struct, frozen=True):
    """An input of a request: raw bytes, which are sent unless they are in `span`."""

    name: str
    datatype: str
    shape: list[int]
    raw: bytes
    span: RegionSpan | None = None


class BenchOutput(msgspec.Struct, frozen=True):
    """An output that goes to shared memory."""

    name: str
    span: RegionSpan


class SequenceFlags(msgspec.Struct, frozen=True):
    """The flags of a request in a sequence."""

    start: bool
    end: bool


#: In the order in which a load process finds them.
SEQUENCE_FLAGS = (
    SequenceFlags(start=False, end=False),
    SequenceFlags(start=True, end=False),
    SequenceFlags(start=False, end=True),
    SequenceFlags(start=True, end=True),
)


class BenchRequest(msgspec.Struct, frozen=True):
    """A request before it is encoded."""

    model: str
    version: str
    inputs: list[BenchInput]
    outputs: list[BenchOutput] = []
    sequence: SequenceFlags | None = None
    parameters: dict[str, Any] = {}


def cut_at_id(encoded: bytes, placeholder: bytes) -> list[bytes]:
    """Return the bytes before and behind the id of the sequence."""
    before, found, behind = encoded.partition(placeholder)
    assert found
    return [before, behind]


def parameters_of(request: BenchRequest) -> dict[str, Any]:
    """Return the parameters of a request, with the parameters of its sequence."""
    found = dict(request.parameters)
    if request.sequence is not None:
        found["sequence_id"] = PLACEHOLDER_ID
        found["sequence_start"] = request.sequence.start
        found["sequence_end"] = request.sequence.end
    return found


class HttpEncoding(msgspec.Struct, frozen=True):
    """How requests are written as HTTP/1.1."""

    #: Host and port, as the header `Host` has them.
    authority: str
    headers: dict[str, str] = {}
    #: Tensors are raw bytes behind the JSON, and not numbers in it.
    binary: bool = True
    #: To `/generate_stream`, whose responses are server-sent events.
    streaming: bool = False

    def encode(self, request: BenchRequest) -> list[bytes]:
        """Return the parts of a request: one, or two with the id of its sequence between them."""
        path = model_path(request.model, request.version)
        headers = {"Host": self.authority, **self.headers}
        if self.streaming:
            body = json.dumps({**_generate_fields(request.inputs), **parameters_of(request)}).encode()
            headers["Content-Type"] = "application/json"
            encoded = _post(f"{path}/generate_stream", headers, body)
        else:
            document = json.dumps(infer_document(request, binary=self.binary)).encode()
            body = document
            if self.binary:
                headers[_HEADER_LENGTH] = str(len(document))
                headers["Content-Type"] = "application/octet-stream"
                body += b"".join(each.raw for each in request.inputs if each.span is None)
            else:
                headers["Content-Type"] = "application/json"
            encoded = _post(f"{path}/infer", headers, body)
        if request.sequence is None:
            return [encoded]
        return cut_at_id(encoded, b"%d" % PLACEHOLDER_ID)


def _post(path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def infer_document(request: BenchRequest, *, binary: bool) -> dict[str, Any]:
    """Return the JSON of a request to `/infer`."""
    document: dict[str, Any] = {"inputs": [_input_document(each, binary=binary) for each in request.inputs]}
    parameters = parameters_of(request)
    if request.outputs:
        document["outputs"] = [
            {"name": each.name, "parameters": span_parameters(each.span)} for each in request.outputs
        ]
    elif binary:
        parameters["binary_data_output"] = True
    if parameters:
        document["parameters"] = parameters
    return document


def span_parameters(span: RegionSpan) -> dict[str, Any]:
    """Return the parameters of a tensor in shared memory."""
    found: dict[str, Any] = {"shared_memory_region": span.region, "shared_memory_byte_size": span.byte_size}
    if span.offset:
        found["shared_memory_offset"] = span.offset
    return found


def _input_document(tensor: BenchInput, *, binary: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype}
    if tensor.span is not None:
        found["parameters"] = span_parameters(tensor.span)
    elif binary:
        found["parameters"] = {"binary_data_size": len(tensor.raw)}
    else:
        found["data"] = json_elements(tensor)
    return found


def json_elements(tensor: BenchInput) -> list[Any]:
    """Return the elements of an input as JSON has them."""
    elements = decode_elements(tensor.datatype, tensor.raw, element_count(tensor.shape))
    if tensor.datatype == "BYTES":
        return [each.decode("utf-8", "replace") for each in elements]
    return elements


def _generate_fields(inputs: Iterable[BenchInput]) -> dict[str, Any]:
    found = {}
    for each in inputs:
        elements = json_elements(each)
        found[each.name] = elements[0] if len(elements) == 1 else elements
    return found


def encode_all(
    encode: Any,
    base: BenchRequest,
    values: Sequence[Sequence[BenchInput]],
    outputs: list[BenchOutput],
    *,
    sequences: bool,
) -> list[list[bytes]]:
    """Return the encoded requests of one connection: one for each of `values`, or four with `sequences`."""
    found = []
    for inputs in values:
        request = msgspec.structs.replace(base, inputs=list(inputs), outputs=outputs)
        if sequences:
            found += [encode(msgspec.structs.replace(request, sequence=flags)) for flags in SEQUENCE_FLAGS]
        else:
            found.append(encode(request))
    return found
