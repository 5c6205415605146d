"""`naiad.openai_fields`: what a model for the OpenAI front door says it does with requests, beside sampling. Pure.

A model gets the whole request, and the server cannot know what it does with each field. What changes only how text is
sampled is left to the model. What changes the form or the meaning of a response is refused unless the model declares
it here:

    parameters { key: "naiad.openai_fields" value { string_value: "logit_bias,response_format" } }
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import BadConfig

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig

OPENAI_FIELDS = "naiad.openai_fields"

#: Fields of requests.
DECLARABLE_FIELDS = frozenset(
    (
        "add_generation_prompt", "allowed_token_ids", "audio", "bad_words", "chat_template_kwargs",
        "continue_final_message", "dimensions", "documents", "function_call", "functions", "ignore_eos",
        "logit_bias", "logprobs", "min_p", "min_tokens", "modalities", "parallel_tool_calls",
        "reasoning_effort", "repetition_penalty", "response_format", "skip_special_tokens",
        "stop_token_ids", "structured_outputs", "suffix", "tool_choice", "tools", "top_k", "top_logprobs",
        "verbosity", "web_search_options",
    )
)  # fmt: skip

#: Parts of messages, and a prompt of token ids in place of text.
DECLARABLE_PARTS = frozenset(("file", "image_url", "input_audio", "prompt_token_ids"))


def openai_fields(config: ModelConfig) -> frozenset[str]:
    """Return what the model declares; nothing without the parameter. Raises `BadConfig` for an unknown name."""
    if OPENAI_FIELDS not in config.parameters:
        return frozenset()
    return declared_fields(config.parameters[OPENAI_FIELDS].string_value, config.name)


def declared_fields(text: str, model: str) -> frozenset[str]:
    """Return the names in the value of the parameter of `model`. Raises `BadConfig` for an unknown name."""
    names = frozenset(name for part in text.split(",") if (name := part.strip()))
    known = DECLARABLE_FIELDS | DECLARABLE_PARTS
    if unknown := sorted(names - known):
        raise BadConfig(
            f"parameter '{OPENAI_FIELDS}' of model '{model}' must be names with commas between; '{unknown[0]}' is none "
            f"of {', '.join(sorted(known))}"
        )
    return names
