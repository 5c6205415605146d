"""Prompts. Before version 0.19 this name was in `vllm.inputs.data`."""

from typing import TypedDict


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
