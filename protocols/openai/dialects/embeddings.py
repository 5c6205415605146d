"""How models that make vectors of texts are spoken to. Pure.

Ours: the input `openai_request` with one input of the client, and the output `embedding`. vLLM's: one JSON object, and
the vector as JSON in the text.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.config.openai_fields import OPENAI_FIELDS, declared_fields
from kernel.config.spec import TensorSpec  # noqa: TC001 - msgspec reads it
from kernel.errors import InternalError
from protocols.openai.dialects.dialect import switch_tensor, texts_tensor
from protocols.openai.dialects.pieces import PROMPT_TOKENS, TEXT_OUTPUT, only_count, only_text
from protocols.openai.dialects.whole_request import REQUEST_INPUT
from protocols.openai.errors import ApiError

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.serving.response import Response
    from shm.tensor import Tensor

EMBEDDING_OUTPUT = "embedding"
EMBEDDING_INPUT = "embedding_request"

_RETURN_TOKENS = "return_num_input_tokens"

_encoder = msgspec.json.Encoder()
_vector_decoder = msgspec.json.Decoder(list[float])


class EmbeddingDialect(Protocol):
    """How one model is spoken to."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def honoured(self) -> frozenset[str]:
        """The fields that reach the model, and `prompt_token_ids` if it takes token ids."""

    @property
    def reason(self) -> str:
        """Why it does not honour others, as the end of a sentence."""

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        """Return the inputs of a request for the vector of `fields["input"]`, one text or one list of token ids."""

    def vector(self, response: Response) -> bytes:
        """Return the vector in a response, as FP32. Raises `InternalError` if there is none."""


class OurEmbeddings(msgspec.Struct, frozen=True):
    """An `EmbeddingDialect`."""

    model: str
    honoured: frozenset[str]
    request: TensorSpec
    reason: str = "does not say that it honours it (naiad.openai_fields)"

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        return [texts_tensor(self.request, [_encoder.encode(fields)])]

    def vector(self, response: Response) -> bytes:
        for output in response.outputs or ():
            if output.name == EMBEDDING_OUTPUT and output.datatype == "FP32" and output.byte_size:
                return bytes(output.raw())
        raise InternalError(f"the model has sent no output '{EMBEDDING_OUTPUT}' of FP32")


class VllmEmbeddings(msgspec.Struct, frozen=True):
    """An `EmbeddingDialect`."""

    model: str
    specs: dict[str, TensorSpec]
    honoured: frozenset[str] = frozenset(("dimensions", "prompt_token_ids"))
    reason: str = "is one of vLLM's backend, which does not take it"

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        asked = {"input": fields["input"]}
        if "dimensions" in fields:
            asked["pooling_params"] = {"dimensions": [fields["dimensions"]]}
        tensors = [texts_tensor(self.specs[EMBEDDING_INPUT], [_encoder.encode(asked)])]
        if _RETURN_TOKENS in self.specs:
            tensors.append(switch_tensor(self.specs[_RETURN_TOKENS], on=True))
        return tensors

    def vector(self, response: Response) -> bytes:
        for output in response.outputs or ():
            if output.name == TEXT_OUTPUT:
                try:
                    values = _vector_decoder.decode(only_text(output))
                except msgspec.DecodeError as error:
                    raise InternalError(f"the model's output '{TEXT_OUTPUT}' is no list of numbers: {error}") from None
                return struct.pack(f"<{len(values)}f", *values)
        raise InternalError(f"the model has sent no output '{TEXT_OUTPUT}' with a vector")


def embedding_dialect(spec: ModelSpec) -> EmbeddingDialect | None:
    """Return how a model is asked for vectors; None for a model that makes none."""
    if (
        EMBEDDING_INPUT in spec.inputs
        and TEXT_OUTPUT in spec.outputs
        and not set(spec.required_inputs) - {EMBEDDING_INPUT}
    ):
        return VllmEmbeddings(spec.name, spec.inputs)
    request, output = spec.inputs.get(REQUEST_INPUT), spec.outputs.get(EMBEDDING_OUTPUT)
    if request is None or output is None or spec.required_inputs not in ((), (REQUEST_INPUT,)):
        return None
    if request.datatype != "BYTES" or output.datatype != "FP32":
        return None
    return OurEmbeddings(spec.name, declared_fields(spec.parameters.get(OPENAI_FIELDS, ""), spec.name), request)


def required_embedding_dialect(spec: ModelSpec) -> EmbeddingDialect:
    """As `embedding_dialect`. Raises `ApiError` for a model without one."""
    found = embedding_dialect(spec)
    if found is None:
        raise ApiError(
            f"model '{spec.name}' makes no embeddings: its inputs and outputs are none of those that OpenAI's API "
            "needs (docs/openai.md)",
            param="model",
        )
    return found


def prompt_tokens(response: Response) -> int | None:
    """Return how many tokens the input has; None if the model does not say it."""
    for output in response.outputs or ():
        if output.name == PROMPT_TOKENS:
            return only_count(output)
    return None
