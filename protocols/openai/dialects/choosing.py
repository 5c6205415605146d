"""Which dialect a model has: what it declares says so, and not the name of its backend. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.openai.dialects.input_each import input_each
from protocols.openai.dialects.vllm import vllm_dialect
from protocols.openai.dialects.whole_request import whole_request
from protocols.openai.errors import ApiError

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from protocols.openai.dialects.dialect import Dialect


def dialect_of(spec: ModelSpec) -> Dialect | None:
    """Return how a model is spoken to; None for a model that this front door cannot serve."""
    return whole_request(spec) or vllm_dialect(spec) or input_each(spec)


def required_dialect(spec: ModelSpec) -> Dialect:
    """As `dialect_of`. Raises `ApiError` for a model without one."""
    found = dialect_of(spec)
    if found is None:
        raise ApiError(
            f"model '{spec.name}' does not generate text: its inputs and outputs are none of those that OpenAI's API "
            "needs (docs/openai.md)",
            param="model",
        )
    return found
