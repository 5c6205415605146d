"""Bodies of OpenAI requests, and what the server makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernel.config.spec import TensorSpec
from protocols.openai.dialects import SAMPLING_FIELDS, WholeRequest
from protocols.openai.errors import ApiError
from protocols.openai.plans import Api, GenerationPlan, make_plan, read_document

MESSAGES = [{"role": "user", "content": "hello"}]


def plan_of(
    body: dict[str, Any] | bytes,
    api: Api = Api.CHAT,
    honoured: frozenset[str] = frozenset(),
    *,
    ready: bool = False,
    default_max_tokens: int | None = None,
) -> tuple[GenerationPlan, list[dict[str, Any]]]:
    """Return the plan for a body, and what the model gets for each choice."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    dialect = WholeRequest("m", ready, SAMPLING_FIELDS | honoured, TensorSpec("openai_request", "BYTES", (1,), (1,)))
    plan, inputs = make_plan(read_document(text, api), dialect, default_max_tokens)
    return plan, [json.loads(bytes(tensor.raw())[4:]) for [tensor] in inputs]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "once", **fields}


def refusal(body: dict[str, Any] | bytes, api: Api = Api.CHAT, **more: Any) -> tuple[int, str | None, str]:
    with pytest.raises(ApiError) as caught:
        plan_of(body, api, **more)
    return caught.value.status, caught.value.param, caught.value.message
