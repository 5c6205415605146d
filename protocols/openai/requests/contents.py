"""The texts of a request: messages of a chat, and prompts. Pure.

A message whose parts are all text gets their text as its content, one line for each part, so that models need not know
both forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocols.openai.errors import ApiError, invalid_field, refused_field

if TYPE_CHECKING:
    from protocols.openai.dialects.dialect import Dialect

_ROLES = ("developer", "system", "user", "assistant", "tool", "function")

#: Parts of a message beside text, which a model must declare. A refusal is what an assistant has said.
_OTHER_PARTS = ("image_url", "input_audio", "file")
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}

#: The most requests that a client's request may become.
MAX_FAN_OUT = 1024


def check_messages(messages: list[Any], dialect: Dialect) -> None:
    """Raise `ApiError` for a value that is not a message, and for parts that the model does not take."""
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        if not isinstance(message, dict):
            raise invalid_field(place, "model_attributes_type", "Input should be a valid dictionary")
        role = message.get("role")
        if role is None:
            raise invalid_field(f"{place}.role", "missing", "Field required")
        if role not in _ROLES:
            raise invalid_field(f"{place}.role", "literal_error", f"Input should be one of {', '.join(_ROLES)}")
        _check_content(message.get("content"), message, place, dialect)


def _check_content(content: Any, message: dict[str, Any], place: str, dialect: Dialect) -> None:
    if content is None:
        if "content" not in message and message["role"] != "assistant":
            raise invalid_field(f"{place}.content", "missing", "Field required")
        if message["role"] not in ("assistant", "function"):
            raise invalid_field(f"{place}.content", "string_type", "Input should be a valid string")
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid_field(f"{place}.content", "string_type", "Input should be a valid string, or a list of parts")
    texts = []
    for number, part in enumerate(content):
        where = f"{place}.content.{number}"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS:
            if not isinstance(part.get(_TEXT_PARTS[kind]), str):
                raise invalid_field(f"{where}.{_TEXT_PARTS[kind]}", "string_type", "Input should be a valid string")
            texts.append(part[_TEXT_PARTS[kind]])
        elif kind not in _OTHER_PARTS:
            raise invalid_field(f"{where}.type", "literal_error", "Input should be the type of a part: text, image_url")
        elif kind not in dialect.honoured:
            reason = f"model '{dialect.model}' {dialect.reason}"
            raise refused_field(where, f"only text message is supported, but got {kind}; {reason}")
    if len(texts) == len(content):
        message["content"] = "\n".join(texts)


def prompts_of(prompt: Any, dialect: Dialect) -> list[Any]:
    """Return the prompts in the field `prompt`: each a text, or a list of token ids if the model takes these.

    Raises `ApiError`.
    """
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not isinstance(prompt, list):
        raise invalid_field("prompt", "string_type", "Input should be a valid string, or a list")
    elif prompt and all(is_token(each) for each in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts:
        raise ApiError("prompt must be non-empty", param="prompt")
    for number, each in enumerate(prompts):
        if isinstance(each, str):
            if not each:
                raise ApiError("prompt must be non-empty", param="prompt")
        elif not isinstance(each, list) or not all(is_token(token) for token in each):
            raise invalid_field(f"prompt.{number}", "string_type", "Input should be a valid string, or token ids")
        elif "prompt_token_ids" not in dialect.honoured:
            raise refused_field("prompt", f"it is of token ids, and model '{dialect.model}' {dialect.reason}")
        elif not each:
            raise ApiError("prompt must be non-empty", param="prompt")
    return prompts


def is_token(value: Any) -> bool:
    """Whether `value` is a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
