"""Requests for embeddings: one request to the model for each input. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocols.openai.errors import ApiError, invalid_field, refused_field
from protocols.openai.requests.contents import MAX_FAN_OUT, is_token
from protocols.openai.requests.fields import EMBEDDING_FIELDS, refuse_others
from protocols.openai.requests.plans import Document, GenerationPlan

if TYPE_CHECKING:
    from protocols.openai.dialects.embeddings import EmbeddingDialect
    from shm.tensor import Tensor


def make_embedding_plan(document: Document, dialect: EmbeddingDialect) -> tuple[GenerationPlan, list[list[Tensor]]]:
    """Return the plan, and the inputs of each request to the model. Raises `ApiError`."""
    fields = document.fields
    refuse_others(fields, EMBEDDING_FIELDS, dialect)
    asked = inputs_of(fields["input"])
    if len(asked) > MAX_FAN_OUT:
        raise ApiError(f"the request has {len(asked)} inputs, expected at most {MAX_FAN_OUT}", param="input")
    if not all(isinstance(each, str) for each in asked) and "prompt_token_ids" not in dialect.honoured:
        raise refused_field("input", f"it is of token ids, and model '{dialect.model}' {dialect.reason}")
    as_base64 = fields.get("encoding_format") == "base64"
    plan = GenerationPlan(document.api, document.model, prompts=len(asked), as_base64=as_base64)
    common = {name: value for name, value in fields.items() if name != "encoding_format"}
    return plan, [dialect.inputs({**common, "input": each}) for each in asked]


def inputs_of(value: Any) -> list[Any]:
    """Return the inputs: each a text, or a list of token ids. Raises `ApiError`."""
    if isinstance(value, str):
        inputs: list[Any] = [value]
    elif not isinstance(value, list):
        raise invalid_field("input", "string_type", "Input should be a valid string, or a list")
    else:
        inputs = [value] if value and all(is_token(each) for each in value) else value
    if not inputs:
        raise invalid_field("input", "too_short", "List should have at least 1 item after validation, not 0")
    for number, each in enumerate(inputs):
        if not isinstance(each, str) and not (isinstance(each, list) and all(is_token(token) for token in each)):
            raise invalid_field(f"input.{number}", "string_type", "Input should be a valid string, or token ids")
        if not each:
            raise invalid_field("input", "too_short", "Value should have at least 1 item after validation, not 0")
    return inputs
