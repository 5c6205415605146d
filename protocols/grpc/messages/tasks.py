"""Large request messages of gRPC, decoded in a helper: the function that runs there, and its arguments. Pure."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
from google.protobuf.message import DecodeError

from kernel.errors import InternalError, InvalidArgument, NoMemory, ServingError, request_prefix
from kernel.serving.request import NO_SINK
from protocols.grpc.framing import MAX_INFLATED_BYTE_SIZE, InflatedTooLarge, broken_compression, inflate
from protocols.grpc.generated.grpc_service_pb2 import InferTensorContents
from protocols.grpc.messages.codec import decode_request, start_request
from protocols.grpc.messages.contents import (
    check_contents,
    check_field,
    packed_size,
    several_contents,
    write_contents,
)
from protocols.grpc.messages.large_request import (
    OtherField,
    TooManyElements,
    are_strings,
    parse_large_request,
    write_strings,
)
from protocols.helpers.decoded_request import TensorBytes, decode_steps
from protocols.helpers.request_task import joined
from protocols.request_limits import decompression_limit, ratio_exceeded
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from kernel.serving.request import Request
    from shm.tensor import Buffer, Tensor

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
    tensors = [deferred.get(index) or _given_bytes(tensor) for index, tensor in enumerate(request.inputs)]
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


def _given_bytes(tensor: Tensor) -> TensorBytes | None:
    """Return raw contents, None for an input in a client's region."""
    data = tensor.data
    return None if data is None else TensorBytes.of(data)
