"""Large request messages of gRPC, decoded in a helper: `decode_message_task` runs there. Pure.

Typed contents are taken out before protobuf parses the rest: protobuf creates objects for all elements at once, and
ends the process if there is not enough memory.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

import msgspec
from google.protobuf.message import DecodeError

from kernel.errors import InternalError, InvalidArgument, NoMemory, ServingError, request_prefix
from kernel.serving.request import NO_SINK
from protocols.grpc.codec import (
    check_contents,
    check_field,
    decode_request,
    packed_size,
    several_contents,
    start_request,
    write_contents,
)
from protocols.grpc.framing import MAX_INFLATED_BYTE_SIZE, InflatedTooLarge, broken_compression, inflate
from protocols.grpc.generated.grpc_service_pb2 import InferTensorContents, ModelInferRequest
from protocols.grpc.wire_format import fields_of, read_length, varint
from protocols.large_requests import MAX_DESCRIPTION_BYTE_SIZE, TensorBytes, decode_steps, given_bytes, joined
from protocols.request_limits import check_count, decompression_limit, ratio_exceeded
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from kernel.serving.request import Request
    from shm.tensor import Buffer, Tensor

#: The most bytes of typed contents of one input. Numbers of one byte become up to eight in protobuf.
MAX_TYPED_BYTE_SIZE = 64 << 20

_PARTS = {
    ModelInferRequest.PARAMETERS_FIELD_NUMBER: "parameters",
    ModelInferRequest.INPUTS_FIELD_NUMBER: "inputs",
    ModelInferRequest.OUTPUTS_FIELD_NUMBER: "outputs",
    ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER: "raw input contents",
}

_INPUTS = ModelInferRequest.INPUTS_FIELD_NUMBER

_RAW = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER

_CONTENTS = ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER

_STRINGS = InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER

_WITH_LENGTH = 2

_INPUT_TAG = bytes((_INPUTS << 3 | _WITH_LENGTH,))

_STRING_TAG = _STRINGS << 3 | _WITH_LENGTH

_NO_CONTENTS = bytes((_CONTENTS << 3 | _WITH_LENGTH, 0))

#: Inputs up to this size are left to protobuf.
SMALL_BYTE_SIZE = 4096

#: The most fields in groups: a field takes two bytes or more, and what is no tensor is limited.
_MAX_IN_GROUPS = MAX_DESCRIPTION_BYTE_SIZE // 2

#: Types of the elements of the other contents, by the numbers of their fields, in protobuf's wire format.
_ELEMENT_TYPES = {1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 5, 7: 1}

_LENGTH = struct.Struct("<I")


class LargeRequest(msgspec.Struct):
    """A request message in its parts, which are views of it."""

    #: The message without raw and large typed contents.
    message: ModelInferRequest
    raw_contents: list[memoryview]
    #: Large typed contents, by the number of their input.
    typed_contents: dict[int, Buffer]


class OtherField(Exception):
    """Strings are followed by another field of the contents."""


class TooManyElements(Exception):
    """There are more strings than the shape says."""


def parse_large_request(message: Buffer) -> LargeRequest:
    """Parse a request message. Raises `InvalidArgument` for too many parts, `NoMemory`, and `DecodeError`."""
    view = memoryview(message)
    rest: list[Buffer] = []
    raw: list[memoryview] = []
    typed: dict[int, Buffer] = {}
    counts = dict.fromkeys(_PARTS, 0)
    rest_size = 0
    for field in fields_of(view, _MAX_IN_GROUPS):
        number = field.number
        if number in counts and field.has_length:  # protobuf skips a number where a message is expected
            counts[number] += 1
            check_count(_PARTS[number], counts[number])
        part: Buffer = view[field.begin : field.end]
        if number == _RAW and field.has_length:
            raw.append(view[field.start : field.end])
            continue
        if number == _INPUTS and field.end - field.start > SMALL_BYTE_SIZE:
            part, contents = _split_input(view[field.start : field.end])
            if contents is not None:
                typed[counts[_INPUTS] - 1] = contents
        rest.append(part)
        rest_size += len(part)
        _check_rest(rest_size)
    return LargeRequest(ModelInferRequest.FromString(b"".join(rest)), raw, typed)


def _split_input(tensor: memoryview) -> tuple[bytes, Buffer | None]:
    """Return an input without its typed contents, as a field of the request, and those; None if there are none."""
    rest: list[Buffer] = []
    contents: list[memoryview] = []
    rest_size = 0
    for field in fields_of(tensor, _MAX_IN_GROUPS):
        if field.number == _CONTENTS and field.has_length:
            contents.append(tensor[field.start : field.end])
            continue
        rest.append(tensor[field.begin : field.end])
        rest_size += field.end - field.begin
        _check_rest(rest_size)
    if contents:
        rest.append(_NO_CONTENTS)
    content = b"".join(rest)
    part = _INPUT_TAG + varint(len(content)) + content
    if not contents:
        return part, None
    size = sum(map(len, contents))
    if size > MAX_TYPED_BYTE_SIZE:
        raise NoMemory(
            f"typed contents of {size} bytes for an input, expected at most {MAX_TYPED_BYTE_SIZE}: send it in "
            "raw_input_contents"
        )
    # A message that comes in several parts is their concatenation (protobuf).
    return part, contents[0] if len(contents) == 1 else b"".join(contents)


def _check_rest(byte_size: int) -> None:
    if byte_size > MAX_DESCRIPTION_BYTE_SIZE:
        raise InvalidArgument(
            "the names, shapes and parameters of the request take too many bytes, expected at most "
            f"{MAX_DESCRIPTION_BYTE_SIZE}"
        )


def are_strings(contents: Buffer) -> bool:
    """Whether typed contents begin with a string."""
    return len(contents) > 0 and contents[0] == _STRING_TAG


def write_strings(contents: Buffer, element_count: int, memory: memoryview) -> int:
    """Write strings of typed contents to `memory` in raw form, and return how many bytes they are.

    `memory` has twice the bytes of `contents`: a string of n bytes takes n + 2 there or more, and n + 4 raw bytes.
    Raises `TooManyElements`, `OtherField`, and `DecodeError`.
    """
    view = memoryview(contents)
    position, size, written, count = 0, len(view), 0, 0
    while position < size:
        if view[position] != _STRING_TAG:
            start, end = _unusual_string(view, position)
            if start < 0:
                position = end
                continue
        else:
            start = position + 1
            length = view[start] if start < size else 0x80
            if length < 0x80:
                start += 1
            else:
                length, start = read_length(view, start)
            end = start + length
            if end > size:
                raise DecodeError("a string that is cut short")
        if count == element_count:
            raise TooManyElements
        count += 1
        length = end - start
        _LENGTH.pack_into(memory, written, length)
        written += 4
        if length:
            memory[written : written + length] = view[start:end]
            written += length
        position = end
    return written


def _unusual_string(view: memoryview, position: int) -> tuple[int, int]:
    """Return start and end of a string whose tag has more bytes than it needs; -1 and the end of a field to skip.

    Raises `OtherField` for elements of another datatype, and `DecodeError`.
    """
    field = next(fields_of(view[position:], len(view)))
    if field.number == _STRINGS and field.has_length:
        return position + field.start, position + field.end
    is_element = view[position] & 7 == _ELEMENT_TYPES.get(field.number)
    if is_element or (field.number in _ELEMENT_TYPES and field.has_length and field.end > field.start):
        raise OtherField
    return -1, position + field.end


#: The name of the function.
DECODE_MESSAGE = "grpc.decode_infer"

#: The text of protobuf's errors, which say no more.
UNPARSABLE = "Unable to parse request"


class DecodeMessageArguments(msgspec.Struct, array_like=True):
    """What is known of a message before it is decoded."""

    streaming: bool
    #: The compression of the message; empty for none.
    encoding: str = ""
    #: As in `ServerOptions`.
    max_decompression_ratio: int = 0


_decoder = msgspec.msgpack.Decoder(DecodeMessageArguments)


def decode_message_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Decode a `ModelInferRequest`, which may be compressed."""
    known = _decoder.decode(arguments)
    message: Buffer = joined(sources)
    if known.encoding:
        message = _inflated(message, known.encoding, known.max_decompression_ratio)
    try:
        parts = parse_large_request(message)
    except DecodeError:
        raise _broken(InternalError(UNPARSABLE)) from None
    request = start_request(parts.message, NO_SINK, streaming=known.streaming)
    deferred: dict[int, TensorBytes] = {}

    def defer(contents: InferTensorContents, datatype: str, name: str, model: str) -> Buffer:
        index = len(request.inputs) - 1  # an input is appended before its contents are read
        large = parts.typed_contents.get(index)
        if large is None or not are_strings(large):
            given = contents if large is None else _parsed_contents(large)
            found = check_contents(given, datatype, name, model)
            if found is not None:
                deferred[index] = TensorBytes(packed_size(given, found), functools.partial(write_contents, found))
        else:
            check_field(InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER, datatype, name, model)
            write = functools.partial(_write_strings, large, request, request.inputs[index])
            deferred[index] = TensorBytes(len(large) * 2, write)
        return b""

    wants_empty_final = decode_request(parts.message, request, parts.raw_contents, defer)
    tensors = [deferred.get(index) or given_bytes(tensor) for index, tensor in enumerate(request.inputs)]
    return (yield from decode_steps(request, tensors, b"1" if wants_empty_final else b""))


def _parsed_contents(contents: Buffer) -> InferTensorContents:
    try:
        return InferTensorContents.FromString(bytes(contents))
    except DecodeError:
        raise _broken(InternalError(UNPARSABLE)) from None


def _write_strings(contents: Buffer, request: Request, tensor: Tensor, memory: memoryview) -> int:
    """Write strings in raw form. Their number is checked, as the worker does it for others."""
    where = f"for inference input '{tensor.name}' for model '{request.model_name}'"
    count = element_count(tensor.shape)
    try:
        return write_strings(contents, count, memory)
    except TooManyElements:
        raise InvalidArgument(
            f"{request_prefix(request.id)}unexpected number of string elements {count + 1} {where}, expecting {count}"
        ) from None
    except OtherField:
        raise InvalidArgument(several_contents(tensor.name, request.model_name)) from None
    except DecodeError:
        raise _broken(InternalError(UNPARSABLE)) from None


def _inflated(message: Buffer, encoding: str, max_ratio: int) -> bytes:
    most = decompression_limit(len(message), MAX_INFLATED_BYTE_SIZE, max_ratio)
    try:
        inflated = inflate(message, encoding, most)
    except InflatedTooLarge as error:
        text = str(error) if most == MAX_INFLATED_BYTE_SIZE else ratio_exceeded(len(message), most, max_ratio)
        raise _broken(NoMemory(text)) from None
    if inflated is None:
        raise _broken(InternalError(broken_compression(encoding)))
    return inflated


def _broken(error: ServingError) -> ServingError:
    """Return the error of a message that is not a request at all: it ends a stream (`StreamCall.request_refused`)."""
    error.before_queueing = True
    return error
