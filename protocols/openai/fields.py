"""The one table of request fields: which are honoured, which are refused, which are known to be without effect. Pure.

First the kinds of values: functions that return a value, or raise `Mismatch` with pydantic's text. Then the tables,
with the ranges and texts of Triton (`schemas/openai.py` of its front end), which docs/openai.md has, too; then the
checks.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from protocols.openai.errors import Mismatch, invalid_field, refused_field

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from protocols.openai.dialects import Dialect, EmbeddingDialect

    #: Returns the value as the server uses it. Raises `Mismatch`.
    Check = Callable[[Any], Any]


#: Limits of stop words. The search for them is linear in the text, for each of them.
MAX_STOP_WORDS = 16

MAX_STOP_LENGTH = 256


def anything(value: Any) -> Any:
    """Accept any JSON."""
    return value


def _of_type(expected: type, kind: str, title: str) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, expected):
            raise Mismatch(kind, f"Input should be a valid {title}")
        return value

    return check


boolean = _of_type(bool, "bool_type", "boolean")
text = _of_type(str, "string_type", "string")
json_object = _of_type(dict, "dict_type", "dictionary")
json_list = _of_type(list, "list_type", "list")


def filled_list(value: Any) -> list[Any]:
    """Accept a list with at least one item."""
    items: list[Any] = json_list(value)
    if not items:
        raise Mismatch("too_short", "List should have at least 1 item after validation, not 0")
    return items


def number(lowest: float | None = None, highest: float | None = None) -> Check:
    """Return the check of a number within bounds, which belong to the range."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Mismatch("float_type", "Input should be a valid number")
        _within(value, lowest, highest)
        return value

    return check


def integer(lowest: int | None = None, highest: int | None = 2**63 - 1) -> Check:
    """Return the check of an integer within bounds. A boolean is none, and 1.0 is 1."""

    def check(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise Mismatch("int_type", "Input should be a valid integer")
        _within(value, lowest, highest)
        return value

    return check


def _within(value: float, lowest: float | None, highest: float | None) -> None:
    if lowest is not None and value < lowest:
        raise Mismatch("greater_than_equal", f"Input should be greater than or equal to {lowest}")
    if highest is not None and value > highest:
        raise Mismatch("less_than_equal", f"Input should be less than or equal to {highest}")


def one_of(*values: str) -> Check:
    """Return the check of a text that is one of `values`."""

    def check(value: Any) -> str:
        if value not in values:
            raise Mismatch("literal_error", f"Input should be {' or '.join(map(repr, values))}")
        return str(value)

    return check


def stop_words(value: Any) -> list[str]:
    """Accept one text or a list of texts; returns the list, without empty texts and repetitions."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise Mismatch("string_type", "Input should be a valid string, or a list of valid strings")
    found = [word for word in dict.fromkeys(words) if word]
    if len(found) > MAX_STOP_WORDS:
        raise Mismatch("too_long", f"List should have at most {MAX_STOP_WORDS} stop words, not {len(found)}")
    for word in found:
        if len(word) > MAX_STOP_LENGTH:
            raise Mismatch(
                "string_too_long", f"A stop word should have at most {MAX_STOP_LENGTH} characters, not {len(word)}"
            )
    return found


class Treatment(enum.Enum):
    """What becomes of a field. The values are the words of docs/openai.md."""

    #: The server does what the field says, perhaps together with the model.
    SERVER = "honoured"
    #: It changes how text is sampled: every model gets it.
    MODEL = "for the model"
    #: Models that declare it get it. It is refused for others.
    DECLARED = "for models that declare it, else refused"
    WITHOUT_EFFECT = "without effect"
    REFUSED = "refused"


class Field(msgspec.Struct, frozen=True):
    """A field of a request. null is the same as its absence, except for a required one."""

    treatment: Treatment
    #: Returns the value as the server uses it; raises `Mismatch`.
    check: Callable[[Any], Any] = anything
    required: bool = False
    #: Values that ask for nothing.
    absent: tuple[Any, ...] = ()
    #: Why it is refused.
    reason: str = ""


_SERVER, _MODEL, _DECLARED = Treatment.SERVER, Treatment.MODEL, Treatment.DECLARED

_WITHOUT, _REFUSED = Treatment.WITHOUT_EFFECT, Treatment.REFUSED

_INT64 = 2**63

_COUNT = integer(0)

_COMMON = {
    "model": Field(_SERVER, text, required=True),
    "stream": Field(_SERVER, boolean),
    "stream_options": Field(_SERVER, json_object),
    "n": Field(_SERVER, integer(1, 128)),
    "max_tokens": Field(_SERVER, _COUNT),
    "stop": Field(_SERVER, stop_words, absent=([], "")),
    "temperature": Field(_MODEL, number(0, 2)),
    "top_p": Field(_MODEL, number(0, 1)),
    "frequency_penalty": Field(_MODEL, number(-2, 2)),
    "presence_penalty": Field(_MODEL, number(-2, 2)),
    "seed": Field(_MODEL, integer(-_INT64, _INT64 - 1)),
    "logit_bias": Field(_DECLARED, json_object, absent=({},)),
    "top_k": Field(_DECLARED, integer(-1)),
    "min_p": Field(_DECLARED, number(0, 1)),
    "repetition_penalty": Field(_DECLARED, number(0)),
    "min_tokens": Field(_DECLARED, _COUNT, absent=(0,)),
    "ignore_eos": Field(_DECLARED, boolean, absent=(False,)),
    "stop_token_ids": Field(_DECLARED, json_list, absent=([],)),
    "bad_words": Field(_DECLARED, json_list, absent=([],)),
    "allowed_token_ids": Field(_DECLARED, json_list),
    "skip_special_tokens": Field(_DECLARED, boolean, absent=(True,)),
    "structured_outputs": Field(_DECLARED, json_object),
    "user": Field(_WITHOUT, text),
}

#: POST /v1/chat/completions.
CHAT_FIELDS: dict[str, Field] = {
    **_COMMON,
    "messages": Field(_SERVER, filled_list, required=True),
    "max_completion_tokens": Field(_SERVER, _COUNT),
    "logprobs": Field(_DECLARED, boolean, absent=(False,)),
    "top_logprobs": Field(_DECLARED, integer(0, 20)),
    "tools": Field(_DECLARED, json_list, absent=([],)),
    "tool_choice": Field(_DECLARED, absent=("none", "auto")),
    "parallel_tool_calls": Field(_DECLARED, boolean, absent=(True,)),
    "functions": Field(_DECLARED, json_list, absent=([],)),
    "function_call": Field(_DECLARED, absent=("none", "auto")),
    "response_format": Field(_DECLARED, json_object, absent=({"type": "text"},)),
    "modalities": Field(_DECLARED, json_list, absent=(["text"],)),
    "audio": Field(_DECLARED, json_object),
    "reasoning_effort": Field(_DECLARED, text),
    "verbosity": Field(_DECLARED, text, absent=("medium",)),
    "web_search_options": Field(_DECLARED, json_object),
    "add_generation_prompt": Field(_DECLARED, boolean, absent=(True,)),
    "continue_final_message": Field(_DECLARED, boolean, absent=(False,)),
    "chat_template_kwargs": Field(_DECLARED, json_object, absent=({},)),
    "documents": Field(_DECLARED, json_list, absent=([],)),
    "chat_template": Field(_REFUSED, reason="a template of a client would be a program; the model brings its own"),
    "moderation": Field(_REFUSED, reason="there is no moderation"),
    "metadata": Field(_WITHOUT, json_object),
    "prediction": Field(_WITHOUT, json_object),
    "prompt_cache_key": Field(_WITHOUT, text),
    "prompt_cache_options": Field(_WITHOUT, json_object),
    "prompt_cache_retention": Field(_WITHOUT, text),
    "safety_identifier": Field(_WITHOUT, text),
    "service_tier": Field(_WITHOUT, text),
    "store": Field(_WITHOUT, boolean),
}

#: POST /v1/completions.
COMPLETION_FIELDS: dict[str, Field] = {
    **_COMMON,
    "prompt": Field(_SERVER, required=True),
    "echo": Field(_SERVER, boolean),
    "best_of": Field(_REFUSED, integer(0, 20), absent=(0, 1), reason="only best_of=1 is, ask for several with 'n'"),
    "logprobs": Field(_DECLARED, integer(0, 5), absent=(0,)),
    "suffix": Field(_DECLARED, text, absent=("",)),
}

#: POST /v1/embeddings.
EMBEDDING_FIELDS: dict[str, Field] = {
    "model": Field(_SERVER, text, required=True),
    "input": Field(_SERVER, required=True),
    "encoding_format": Field(_SERVER, one_of("float", "base64")),
    "dimensions": Field(_DECLARED, integer(1, 1 << 20)),
    "user": Field(_WITHOUT, text),
}

_OBFUSCATION = Field(_REFUSED, boolean, absent=(False,), reason="chunks have the size of their text")

#: Members of `stream_options`.
STREAM_OPTIONS = {"include_usage": Field(_SERVER, boolean), "include_obfuscation": _OBFUSCATION}

_KEEPS_NOTHING = "the server keeps no responses: send the whole conversation as 'input'"

#: POST /v1/responses.
RESPONSE_FIELDS: dict[str, Field] = {
    "model": Field(_SERVER, text, required=True),
    "input": Field(_SERVER, required=True),
    "instructions": Field(_SERVER, text),
    "max_output_tokens": Field(_SERVER, integer(1)),
    "stream": Field(_SERVER, boolean),
    "stream_options": Field(_SERVER, json_object),
    "text": Field(_SERVER, json_object),
    "reasoning": Field(_SERVER, json_object),
    "metadata": Field(_SERVER, json_object),
    "include": Field(_SERVER, json_list, absent=([],)),
    "temperature": Field(_MODEL, number(0, 2)),
    "top_p": Field(_MODEL, number(0, 1)),
    "tools": Field(_DECLARED, json_list, absent=([],)),
    "tool_choice": Field(_DECLARED, absent=("none", "auto")),
    "parallel_tool_calls": Field(_DECLARED, boolean, absent=(True,)),
    "previous_response_id": Field(_REFUSED, reason=_KEEPS_NOTHING),
    "conversation": Field(_REFUSED, reason=_KEEPS_NOTHING),
    "background": Field(_REFUSED, boolean, absent=(False,), reason="the server keeps no responses"),
    "background_options": Field(_REFUSED, reason="the server keeps no responses"),
    "context_management": Field(_REFUSED, absent=([],), reason="the server changes no conversation"),
    "truncation": Field(_REFUSED, text, absent=("disabled",), reason="the server shortens no conversation"),
    "prompt": Field(_REFUSED, reason="the server keeps no prompts"),
    "moderation": Field(_REFUSED, reason="there is no moderation"),
    "image": Field(_REFUSED, reason="no tool of the server makes images"),
    "access_programs": Field(_REFUSED, reason="there are none"),
    "top_logprobs": Field(_REFUSED, integer(0, 20), absent=(0,), reason="responses have no log probabilities"),
    "max_tool_calls": Field(_WITHOUT, _COUNT),  # it limits tools of the server, which has none
    "prompt_cache_key": Field(_WITHOUT, text),
    "prompt_cache_options": Field(_WITHOUT, json_object),
    "prompt_cache_retention": Field(_WITHOUT, text),
    "safety_identifier": Field(_WITHOUT, text),
    "service_tier": Field(_WITHOUT, text),
    "store": Field(_WITHOUT, boolean),
    "user": Field(_WITHOUT, text),
}

#: Members of `stream_options` and of `text` there.
RESPONSE_STREAM_OPTIONS = {"include_obfuscation": _OBFUSCATION}
RESPONSE_TEXT = {
    "format": Field(_SERVER, json_object),
    "verbosity": Field(_DECLARED, text, absent=("medium",)),
}


def checked(document: Any, table: dict[str, Field]) -> dict[str, Any]:
    """Return the fields that are given and ask for something, with checked values. Raises `ApiError`."""
    if not isinstance(document, dict):
        raise invalid_field("", "model_attributes_type", "Input should be a valid dictionary")
    return checked_members(document, table, "")


def checked_members(document: dict[str, Any], table: dict[str, Field], prefix: str) -> dict[str, Any]:
    """As `checked`, for the members of a field; `prefix` is its name and a full stop."""
    for name, each in table.items():
        if each.required and name not in document:
            raise invalid_field(prefix + name, "missing", "Field required")
    found = {}
    for name, value in document.items():
        if (field := table.get(name)) is None:
            raise invalid_field(prefix + name[:100], "extra_forbidden", "Extra inputs are not permitted")
        if value is None and not field.required:
            continue
        try:
            kept = field.check(value)
        except Mismatch as mismatch:
            raise invalid_field(prefix + name, mismatch.kind, str(mismatch)) from None
        if any(kept == each and type(kept) is type(each) for each in field.absent):
            continue
        if field.treatment is Treatment.REFUSED:
            raise refused_field(prefix + name, field.reason)
        if field.treatment is not Treatment.WITHOUT_EFFECT:
            found[name] = kept
    return found


def refuse_others(
    fields: Collection[str],
    table: dict[str, Field],
    dialect: Dialect | EmbeddingDialect,
    sent_as: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise `ApiError` for the first of `fields` that is the model's matter and that does not reach it.

    `sent_as` has fields that the client calls otherwise.
    """
    for name in fields:
        if table[name].treatment in (Treatment.MODEL, Treatment.DECLARED) and name not in dialect.honoured:
            raise refused_field(sent_as.get(name, name), f"model '{dialect.model}' {dialect.reason}")
