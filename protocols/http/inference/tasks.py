"""Large bodies of /infer and /generate, decoded and encoded in a helper: the functions that run there. Pure.

`protocols/large_requests.py` and `protocols/http/inference/infer_call.py` start them. Their arguments are here, too.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from kernel.config.spec import ModelSpec  # noqa: TC001 - msgspec reads it
from kernel.errors import InvalidArgument, ServingError, request_prefix
from kernel.serving.helper_tasks import TaskResult
from kernel.serving.request import NO_SINK, Request
from kernel.serving.response import Response
from protocols.http.inference.compression import IDENTITY, compress_parts, decompress
from protocols.http.inference.decoding import (
    OutputFormat,
    decode_infer,
    decode_raw,
    decode_typed,
    json_input_too_large,
)
from protocols.http.inference.encoding import encode_infer
from protocols.http.inference.generate_codec import decode_generate, encode_generate
from protocols.http.json.document import LARGE_BYTE_SIZE
from protocols.http.json.large import TooManyStrings, packed_size, write_data, write_flat
from protocols.http.json.tensor import NeedsCare, check_readable
from protocols.large_requests import TensorBytes, decode_steps, given_bytes, joined
from shm.datatypes import DATATYPES
from shm.tensor import ClientSpan, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from kernel.serving.response import ParameterValue
    from shm.tensor import Buffer

#: The names of the functions.
DECODE_INFER, ENCODE_INFER = "http.decode_infer", "http.encode_infer"
DECODE_GENERATE, ENCODE_GENERATE = "http.decode_generate", "http.encode_generate"


# ---- requests to /infer ----------------------------------------------------------------------


class DecodeArguments(msgspec.Struct, array_like=True):
    """What is known of a body before it is decoded."""

    spec: ModelSpec
    #: The model's name as the client gave it, for errors.
    model_name: str
    #: `Inference-Header-Content-Length`; None if the client sent none. 0 stands for a raw request.
    announced: int | None
    content_encoding: str
    max_input_size: int
    max_inflation: int


_arguments_decoder = msgspec.msgpack.Decoder(DecodeArguments)


def decode_infer_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Decode an inference request, which may be compressed."""
    known = _arguments_decoder.decode(arguments)
    body = joined(sources)
    if known.content_encoding != IDENTITY:
        try:
            body = memoryview(decompress(body, known.max_input_size, known.max_inflation))
        except ServingError as error:
            error.before_queueing = True  # the call tells it from others by this
            raise
    length = header_length(known.announced, len(body))
    if not length:
        request = Request(known.model_name, [], NO_SINK)
        request.inputs.append(decode_raw(body, known.spec))
        options, contents = OutputFormat(binary=True), list(map(given_bytes, request.inputs))
    else:
        header, binary = bytes(body[:length]), body[length:]
        try:
            request, options, contents = _decode_usual(header, binary, known)
        except NeedsCare:
            request, options, contents = _decode_carefully(header, binary, known)
    return (yield from decode_steps(request, contents, encode_output_format(options)))


#: A request, which outputs are to be binary, and the bytes of each input; None for one in a client's region.
_Decoded = tuple[Request, OutputFormat, list[TensorBytes | None]]


def _decode_usual(header: bytes, binary: memoryview, known: DecodeArguments) -> _Decoded:
    """Decode a request in which nothing is wrong or unusual, and read its numbers once. Raises `NeedsCare`."""
    request = Request(known.model_name, [], NO_SINK)
    if len(header) <= LARGE_BYTE_SIZE:
        options = decode_typed(header, binary, request, known.max_input_size)
        return request, options, list(map(given_bytes, request.inputs))
    deferred: dict[int, TensorBytes] = {}

    def defer(name: str, datatype: str, text: memoryview, count: int, max_input_size: int) -> Buffer:
        check_readable(name, datatype)
        byte_size = count * DATATYPES[datatype].byte_size
        if not 0 < byte_size <= max_input_size:
            raise NeedsCare
        index = len(request.inputs)

        def write(memory: memoryview) -> int:
            try:
                return write_flat(datatype, text, count, memory)
            except NeedsCare:
                content = _decode_carefully(header, binary, known)[2][index]
                assert content is not None, "an input in JSON has bytes"
                return content.write(memory)

        deferred[index] = TensorBytes(byte_size, write)
        return b""

    options = decode_typed(header, binary, request, known.max_input_size, defer)
    return request, options, [deferred.get(index) or given_bytes(each) for index, each in enumerate(request.inputs)]


def _decode_carefully(header: bytes, binary: memoryview, known: DecodeArguments) -> _Decoded:
    """Decode any request. Raises `ServingError`."""
    request = Request(known.model_name, [], NO_SINK)
    deferred: dict[int, TensorBytes] = {}

    def defer(name: str, datatype: str, text: memoryview, count: int, max_input_size: int) -> Buffer:
        deferred[len(request.inputs)] = json_bytes(request, name, datatype, text, count, max_input_size)
        return b""

    options = decode_infer(header, binary, request, known.max_input_size, defer)
    return request, options, [deferred.get(index) or given_bytes(each) for index, each in enumerate(request.inputs)]


def json_bytes(
    request: Request, name: str, datatype: str, text: memoryview, count: int, max_input_size: int
) -> TensorBytes:
    """Return the bytes of an input in JSON. Raises `ServingError` if there are too many."""
    if count == 0:
        return TensorBytes(0, lambda memory: 0)
    check_readable(name, datatype)
    byte_size = packed_size(DATATYPES[datatype].byte_size, count, text)
    if datatype != "BYTES" and byte_size > max_input_size:
        raise json_input_too_large(name, byte_size, max_input_size)

    def write(memory: memoryview) -> int:
        try:
            written = write_data(name, datatype, text, count, memory)
        except TooManyStrings:
            raise InvalidArgument(
                f"{request_prefix(request.id)}unexpected number of string elements {count + 1} for inference input "
                f"'{name}' for model '{request.model_name}', expecting {count}"
            ) from None
        if written > max_input_size:
            raise json_input_too_large(name, written, max_input_size)
        return written

    return TensorBytes(byte_size, write)


def header_length(announced: int | None, body_byte_size: int) -> int:
    """Return how much of the body is JSON; 0 stands for a raw request, which an empty body is too."""
    if announced is None:
        return body_byte_size
    if not 0 <= announced <= body_byte_size:
        raise InvalidArgument(f"inference header size should be in range (0, {body_byte_size}), got: {announced}")
    return announced


# ---- responses of /infer ---------------------------------------------------------------------


class EncodeArguments(msgspec.Struct, array_like=True):
    """A response without the bytes of its outputs, which are the sources of the task."""

    model_name: str
    model_version: str
    id: str
    #: (name, datatype, shape) of each.
    outputs: list[tuple[str, str, list[int]]]
    #: Whether the bytes of each output are in the response, and so among the sources.
    given: list[bool]
    parameters: dict[str, str | int | bool | float] | None
    output_format: bytes
    encoding: str


_encode_arguments_decoder = msgspec.msgpack.Decoder(EncodeArguments)

#: Returns how many bytes of an encoded body are JSON, and whether binary data follows.
read_lengths = msgspec.msgpack.Decoder(tuple[int, bool]).decode

_format_decoder = msgspec.msgpack.Decoder(tuple[bool, dict[str, bool]])

#: The place of an output that the model wrote to the client's region: it is not part of the body.
_IN_REGION = ClientSpan("", 0)


def encode_output_format(output_format: OutputFormat) -> bytes:
    return msgspec.msgpack.encode((output_format.binary, output_format.named))


def read_output_format(message: bytes) -> OutputFormat:
    binary, named = _format_decoder.decode(message)
    found = OutputFormat(binary=binary)
    found.named = named
    return found


def encode_arguments(response: Response, output_format: OutputFormat, encoding: str) -> tuple[bytes, list[Tensor]]:
    """Return the arguments of `encode_infer_task` and its sources, whose leases are the response's."""
    outputs = response.outputs or []
    given = [output.response_bytes() is not None for output in outputs]
    arguments = EncodeArguments(
        response.model_name,
        response.model_version,
        response.id,
        [(output.name, output.datatype, output.shape) for output in outputs],
        given,
        response.parameters,
        encode_output_format(output_format),
        encoding,
    )
    return msgspec.msgpack.encode(arguments), list(itertools.compress(outputs, given))


def encode_infer_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Encode the response to an inference request; the output is the body, compressed if that was asked for."""
    known = _encode_arguments_decoder.decode(arguments)
    response = read_response(arguments, sources)
    encoded = encode_infer(response, read_output_format(known.output_format))
    message = msgspec.msgpack.encode((len(encoded.header), encoded.has_binary))
    parts: list[Buffer] = [encoded.header, *encoded.binary]
    if known.encoding != IDENTITY:
        parts = compress_parts(parts, known.encoding)
    return TaskResult(message, parts)
    yield b""  # never: it makes a generator, as every task function is


def read_response(arguments: bytes, sources: Sequence[memoryview]) -> Response:
    """Return the response that `encode_arguments` has described, with the bytes of its outputs."""
    known = _encode_arguments_decoder.decode(arguments)
    data = iter(sources)
    outputs = [
        Tensor(name, datatype, shape, next(data)) if given else Tensor(name, datatype, shape, client_span=_IN_REGION)
        for (name, datatype, shape), given in zip(known.outputs, known.given, strict=True)
    ]
    parameters: dict[str, ParameterValue] | None = None if known.parameters is None else dict(known.parameters)
    return Response(known.model_name, known.model_version, known.id, outputs, parameters)


# ---- /generate -------------------------------------------------------------------------------


class DecodeGenerateArguments(msgspec.Struct, array_like=True):
    """What is known of a body before it is decoded."""

    spec: ModelSpec
    max_input_size: int


_generate_decoder = msgspec.msgpack.Decoder(DecodeGenerateArguments)


def decode_generate_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Decode the body of a request."""
    known = _generate_decoder.decode(arguments)
    request = Request(known.spec.name, [], NO_SINK, streaming=True)
    contents: list[TensorBytes | None] = []

    def defer(name: str, datatype: str, text: memoryview, count: int, max_input_size: int) -> Buffer:
        contents.append(json_bytes(request, name, datatype, text, count, max_input_size))
        return b""

    decode_generate(bytes(joined(sources)), request, known.spec, known.max_input_size, defer)
    return (yield from decode_steps(request, contents))


def encode_generate_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Encode a response; the output is its body."""
    return TaskResult(b"", [encode_generate(read_response(arguments, sources))])
    yield b""  # never: it makes a generator, as every task function is
