"""Which models this front door serves, found by the inputs and outputs that they declare. Pure.

Ours, for Python models: the input `openai_request` is the whole request as JSON, after the checks. The model responds
with `text_output`, any number of times if it is decoupled, or with `openai_response`: chunks and bodies that it has
made itself. Beside text it may have the outputs `finish_reason`, `num_input_tokens` and `num_output_tokens`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from kernel.config.openai_fields import OPENAI_FIELDS, declared_fields
from kernel.errors import InternalError
from protocols.openai.errors import ApiError
from shm.datatypes import DATATYPES
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.serving.response import Response

REQUEST_INPUT = "openai_request"
TEXT_OUTPUT, READY_OUTPUT = "text_output", "openai_response"
FINISH_OUTPUT, PROMPT_TOKENS, OUTPUT_TOKENS = "finish_reason", "num_input_tokens", "num_output_tokens"

#: What can be in a response only if the model makes it itself.
_ONLY_READY = frozenset(
    ("audio", "function_call", "functions", "logprobs", "modalities", "parallel_tool_calls", "tool_choice", "tools",
     "top_logprobs")
)  # fmt: skip

#: Texts for the end of a generation, and what they are called at OpenAI. Others are not the end.
_FINISH_REASONS = {
    name: name for name in ("stop", "length", "tool_calls", "content_filter", "function_call")
} | {"abort": "stop"}  # fmt: skip


class Dialect(msgspec.Struct, frozen=True):
    """How a model is spoken to."""

    model: str
    #: Whether the model makes chunks and bodies itself; otherwise it sends text.
    ready: bool
    #: The fields and parts that models have to declare, and that this one honours.
    honoured: frozenset[str]
    #: The shape of every input: one row.
    shape: tuple[int, ...]

    def inputs(self, text: bytes) -> list[Tensor]:
        """Return the inputs of a request whose JSON is `text`."""
        return [Tensor(REQUEST_INPUT, "BYTES", list(self.shape), len(text).to_bytes(4, "little") + text)]


class Piece(msgspec.Struct, gc=False):
    """What one response of a model has in it."""

    #: UTF-8, perhaps with the beginning of a character at its end, or a ready chunk.
    text: bytes = b""
    #: Empty if the model does not say that the text ends.
    finish_reason: str = ""
    #: None where the model does not say it.
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@functools.lru_cache(maxsize=4096)
def _declared(text: str, model: str) -> frozenset[str]:
    return declared_fields(text, model)


def dialect_of(spec: ModelSpec) -> Dialect | None:
    """Return how the model is spoken to; None for a model that this front door cannot serve."""
    request = spec.inputs.get(REQUEST_INPUT)
    if request is None or request.datatype != "BYTES" or any(name != REQUEST_INPUT for name in spec.required_inputs):
        return None
    ready, text = spec.outputs.get(READY_OUTPUT), spec.outputs.get(TEXT_OUTPUT)
    output = ready or text
    if output is None or output.datatype != "BYTES":
        return None
    declared = _declared(spec.parameters.get(OPENAI_FIELDS, ""), spec.name)
    shape = (1, 1) if spec.max_batch_size else (1,)
    return Dialect(spec.name, ready is not None, declared if ready is not None else declared - _ONLY_READY, shape)


def required_dialect(spec: ModelSpec) -> Dialect:
    """As `dialect_of`. Raises `ApiError` for a model without one."""
    found = dialect_of(spec)
    if found is None:
        raise ApiError(
            f"model '{spec.name}' does not generate text: expected an input '{REQUEST_INPUT}' and an output "
            f"'{TEXT_OUTPUT}' or '{READY_OUTPUT}', all of TYPE_STRING (docs/openai.md)",
            param="model",
        )
    return found


def read_piece(response: Response, dialect: Dialect) -> Piece:
    """Return what is in a response with outputs. Raises `InternalError` for what the dialect does not have."""
    piece = Piece()
    wanted = READY_OUTPUT if dialect.ready else TEXT_OUTPUT
    for output in response.outputs or ():
        name = output.name
        if name == wanted:
            piece.text = _only_text(output)
        elif name == FINISH_OUTPUT:
            piece.finish_reason = _FINISH_REASONS.get(_only_text(output).decode(errors="replace"), "")
        elif name == PROMPT_TOKENS:
            piece.prompt_tokens = _only_count(output)
        elif name == OUTPUT_TOKENS:
            piece.output_tokens = _only_count(output)
    return piece


def _only_text(output: Tensor) -> bytes:
    """Return the only element of a tensor of BYTES."""
    octets = output.data if output.data is not None else output.raw()
    if output.datatype != "BYTES" or len(octets) < 4 or int.from_bytes(octets[:4], "little") != len(octets) - 4:
        raise InternalError(
            f"the model's output '{output.name}' is {output.datatype} of shape {output.shape}, expected one text"
        )
    return bytes(octets[4:])


def _only_count(output: Tensor) -> int:
    octets = output.data if output.data is not None else output.raw()
    datatype = DATATYPES[output.datatype]
    if "INT" not in output.datatype or len(octets) != datatype.byte_size:
        raise InternalError(
            f"the model's output '{output.name}' is {output.datatype} of shape {output.shape}, expected one integer"
        )
    return int.from_bytes(octets, "little", signed=not output.datatype.startswith("U"))
