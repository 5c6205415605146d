"""Large request messages of gRPC, decoded in a helper: the function that runs there, and its arguments. Pure."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
from google.protobuf.message import DecodeError

from kernel.errors import InternalError, NoMemory, ServingError
from kernel.serving.request import NO_SINK
from protocols.grpc.framing import MAX_INFLATED_BYTE_SIZE, InflatedTooLarge, broken_compression, inflate
from protocols.grpc.messages.codec import decode_request, parse_request, start_request
from protocols.grpc.messages.contents import check_contents, packed_size, write_contents
from protocols.helpers.decoded_request import TensorBytes, decode_steps
from protocols.helpers.request_task import joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from protocols.grpc.generated.grpc_service_pb2 import InferTensorContents
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


_decoder = msgspec.msgpack.Decoder(DecodeMessageArguments)


def decode_message_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Decode a `ModelInferRequest`, which may be compressed."""
    known = _decoder.decode(arguments)
    message: Buffer = joined(sources)
    if known.encoding:
        message = _inflated(message, known.encoding)
    try:
        parsed, raw_contents = parse_request(message)
    except DecodeError:
        raise _broken(InternalError(UNPARSABLE)) from None
    request = start_request(parsed, NO_SINK, streaming=known.streaming)
    deferred: dict[int, TensorBytes] = {}

    def defer(contents: InferTensorContents, datatype: str, name: str, model: str) -> Buffer:
        found = check_contents(contents, datatype, name, model)
        if found is not None:
            # An input is appended before its contents are read.
            write = functools.partial(write_contents, found)
            deferred[len(request.inputs) - 1] = TensorBytes(packed_size(contents, found), write)
        return b""

    wants_empty_final = decode_request(parsed, request, raw_contents, defer)
    tensors = [deferred.get(index) or _given_bytes(tensor) for index, tensor in enumerate(request.inputs)]
    return (yield from decode_steps(request, tensors, b"1" if wants_empty_final else b""))


def _inflated(message: Buffer, encoding: str) -> bytes:
    try:
        inflated = inflate(message, encoding, MAX_INFLATED_BYTE_SIZE)
    except InflatedTooLarge as error:
        raise _broken(NoMemory(str(error))) from None
    if inflated is None:
        raise _broken(InternalError(broken_compression(encoding)))
    return inflated


def _broken(error: ServingError) -> ServingError:
    """Return the error of a message that is no request at all: it ends a stream (`StreamCall.request_refused`)."""
    error.before_queueing = True
    return error


def _given_bytes(tensor: Tensor) -> TensorBytes | None:
    """Return raw contents, None for an input in a client's region."""
    data = tensor.data
    return None if data is None else TensorBytes.of(data)
