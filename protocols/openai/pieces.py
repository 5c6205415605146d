"""What one response of a model has in it: a piece of text, or a chunk that the model has made itself. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InternalError
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from kernel.serving.response import Response
    from shm.tensor import Tensor

TEXT_OUTPUT, READY_OUTPUT = "text_output", "openai_response"

FINISH_OUTPUT, PROMPT_TOKENS, OUTPUT_TOKENS = "finish_reason", "num_input_tokens", "num_output_tokens"

LOGPROBS_OUTPUT = "logprobs"

#: Texts for the end of a generation, and what they are called at OpenAI. Others, such as `None`, are no end.
_FINISH_REASONS = {
    **{name: name for name in ("stop", "length", "tool_calls", "content_filter", "function_call")},
    "abort": "stop",
}


class Piece(msgspec.Struct, gc=False):
    """What one response of a model has in it."""

    #: UTF-8, perhaps with the beginning of a character at its end, or a ready chunk.
    text: bytes = b""
    #: Empty if the model does not say that the text ends.
    finish_reason: str = ""
    #: None where the model does not say it.
    prompt_tokens: int | None = None
    #: Of this response.
    output_tokens: int | None = None
    #: Of its tokens, as `protocols.openai.logprobs` reads it; empty where the model does not say it.
    logprobs: bytes = b""


def read_piece(response: Response, wanted: str) -> Piece:
    """Return what is in a response with outputs; `wanted` is the output with text, or with ready chunks.

    Raises `InternalError` for an output of another form.
    """
    piece = Piece()
    for output in response.outputs or ():
        name = output.name
        if name == wanted:
            piece.text = only_text(output)
        elif name == FINISH_OUTPUT:
            piece.finish_reason = _FINISH_REASONS.get(only_text(output).decode(errors="replace"), "")
        elif name == PROMPT_TOKENS:
            piece.prompt_tokens = only_count(output)
        elif name == OUTPUT_TOKENS:
            piece.output_tokens = only_count(output)
        elif name == LOGPROBS_OUTPUT:
            piece.logprobs = only_text(output)
    return piece


#: A longer text of a response, in bytes, is taken in parts of this size; other clients are served between them.
PART_BYTE_SIZE = 16 << 10


def long_text(response: Response, wanted: str) -> memoryview | None:
    """Return the text of a response if it is long: UTF-8, valid until the response is released.

    None for a shorter one, and for an output of another form: `read_piece` says what is wrong with it.
    """
    for output in response.outputs or ():
        if output.name != wanted or output.datatype != "BYTES" or output.byte_size <= PART_BYTE_SIZE:
            continue
        octets = memoryview(output.data if output.data is not None else output.raw())
        if int.from_bytes(octets[:4], "little") == len(octets) - 4:
            return octets[4:]
    return None


def whole_text(response: Response, wanted: str) -> str | None:
    """Return the text of a response that has nothing else and is not the last, if it ends with a whole character.

    Most responses of a stream are such. None for another one, of which `read_piece` says what is wrong.
    """
    outputs = response.outputs
    if outputs is None or response.final or response.error is not None or len(outputs) != 1:
        return None
    [output] = outputs
    octets = output.data
    if octets is None or output.name != wanted or output.datatype != "BYTES" or not 5 <= len(octets) <= PART_BYTE_SIZE:
        return None
    if int.from_bytes(octets[:4], "little") != len(octets) - 4:
        return None
    try:
        text = str(octets[4:], "utf-8")
    except UnicodeDecodeError:
        return None
    return None if text[-1] == "\ufffd" else text


def only_text(output: Tensor) -> bytes:
    """Return the only element of a tensor of BYTES."""
    octets = output.data if output.data is not None else output.raw()
    if output.datatype != "BYTES" or len(octets) < 4 or int.from_bytes(octets[:4], "little") != len(octets) - 4:
        raise InternalError(
            f"the model's output '{output.name}' is {output.datatype} of shape {output.shape}, expected one text"
        )
    return bytes(octets[4:])


def only_count(output: Tensor) -> int:
    octets = output.data if output.data is not None else output.raw()
    if "INT" not in output.datatype or len(octets) != DATATYPES[output.datatype].byte_size:
        raise InternalError(
            f"the model's output '{output.name}' is {output.datatype} of shape {output.shape}, expected one integer"
        )
    return int.from_bytes(octets, "little", signed=not output.datatype.startswith("U"))


def prompt_tokens(response: Response) -> int | None:
    """Return how many tokens the input has; None if the model does not say it."""
    for output in response.outputs or ():
        if output.name == PROMPT_TOKENS:
            return only_count(output)
    return None
