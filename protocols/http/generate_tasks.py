"""Large bodies of /generate, decoded and encoded in a helper: the functions that run there. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.spec import ModelSpec  # noqa: TC001 - msgspec reads it
from kernel.serving.helper_tasks import TaskResult
from kernel.serving.request import NO_SINK, Request
from protocols.helpers.decoded_request import TensorBytes, decode_steps
from protocols.helpers.request_task import joined
from protocols.http.generate_codec import decode_generate, encode_generate
from protocols.http.inference.tasks import json_bytes, read_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from shm.tensor import Buffer

#: The names of the functions.
DECODE_GENERATE, ENCODE_GENERATE = "http.decode_generate", "http.encode_generate"


class DecodeGenerateArguments(msgspec.Struct, array_like=True):
    """What is known of a body before it is decoded."""

    spec: ModelSpec
    max_input_size: int


_decoder = msgspec.msgpack.Decoder(DecodeGenerateArguments)


def decode_generate_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Decode the body of a request."""
    known = _decoder.decode(arguments)
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
