"""Requests of the Responses API as requests of a chat. Pure.

The server keeps no responses, so that the client sends the whole conversation each time, as a text or as items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from protocols.openai.errors import ApiError, invalid_field, refused_field
from protocols.openai.fields import RESPONSE_STREAM_OPTIONS, RESPONSE_TEXT, checked_members

if TYPE_CHECKING:
    from collections.abc import Mapping

_encode = msgspec.json.Encoder().encode

#: Fields of a chat under the names that they have here, for errors.
SENT_AS: Mapping[str, str] = {
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
}

#: Fields that mean the same in a chat.
_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")

#: What a response repeats of its request, and what it says without it.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}

#: What is the same in all responses: nothing is kept, cut off or done later.
_CONSTANT = {"background": False, "previous_response_id": None, "store": False, "truncation": "disabled"}

#: The most bytes of what a response repeats: each stream has it three times.
MAX_REPEATED = 1 << 20

_ROLES = ("user", "assistant", "system", "developer")


class ChatOfResponse(msgspec.Struct):
    """A request of this API as that of a chat."""

    #: Under the names of a chat.
    fields: dict[str, Any]
    #: The members of the response that repeat the request, as JSON.
    repeated: bytes
    #: Where each message was in the request.
    places: list[str]


def as_chat(fields: dict[str, Any]) -> ChatOfResponse:
    """Return the request of a chat for checked fields. Raises `ApiError`."""
    chat = {name: fields[name] for name in _SAME if name in fields}
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    if "stream_options" in fields:
        checked_members(fields["stream_options"], RESPONSE_STREAM_OPTIONS, "stream_options.")
        if not fields.get("stream"):
            raise invalid_field("stream_options", "value_error", "It can only be used when `stream` is true")
    if fields.get("stream"):
        chat["stream_options"] = {"include_usage": True}  # the last event has it
    _add_text(chat, fields.get("text", {}))
    _add_reasoning(chat, fields.get("reasoning", {}))
    if "tools" in fields:
        chat["tools"] = [_tool(tool, f"tools.{number}") for number, tool in enumerate(fields["tools"])]
    if "tool_choice" in fields:
        chat["tool_choice"] = _tool_choice(fields["tool_choice"])
    _refuse_included(fields.get("include", []))
    messages = _Messages()
    if "instructions" in fields:
        messages.add("instructions", {"role": "system", "content": fields["instructions"]})
    messages.add_input(fields["input"])
    chat["messages"] = messages.all
    repeated = _encode(_CONSTANT | {name: fields.get(name, absent) for name, absent in _REPEATED.items()})
    if len(repeated) > MAX_REPEATED:
        raise ApiError(
            f"what the response repeats of the request, such as 'instructions', 'metadata' and 'tools', has "
            f"{len(repeated)} bytes together, expected at most {MAX_REPEATED}",
            413,
        )
    return ChatOfResponse(chat, repeated, messages.places)


def _add_text(chat: dict[str, Any], text: dict[str, Any]) -> None:
    """Put what the field `text` says into `chat`."""
    found = checked_members(text, RESPONSE_TEXT, "text.")
    if "verbosity" in found:
        chat["verbosity"] = found["verbosity"]
    if "format" not in found:
        return
    form = found["format"]
    kind = form.get("type")
    if kind == "json_schema":
        if not isinstance(form.get("schema"), dict) or not isinstance(form.get("name"), str):
            raise invalid_field("text.format", "missing", "A json_schema has a 'name' and a 'schema'")
        schema = {
            name: form[name] for name in ("name", "description", "schema", "strict") if form.get(name) is not None
        }
        chat["response_format"] = {"type": kind, "json_schema": schema}
    elif kind == "json_object":
        chat["response_format"] = {"type": kind}
    elif kind != "text":
        raise invalid_field("text.format.type", "literal_error", "Input should be text, json_object or json_schema")


def _add_reasoning(chat: dict[str, Any], reasoning: dict[str, Any]) -> None:
    """Put what the field `reasoning` says into `chat`."""
    for name, value in reasoning.items():
        if value is None:
            continue
        if name != "effort":
            raise refused_field(f"reasoning.{name}"[:100], "the model's reasoning is no part of a response here")
        if not isinstance(value, str):
            raise invalid_field("reasoning.effort", "string_type", "Input should be a valid string")
        chat["reasoning_effort"] = value


def _tool(tool: Any, place: str) -> dict[str, Any]:
    """Return a tool as a chat has it."""
    if not isinstance(tool, dict):
        raise invalid_field(place, "model_attributes_type", "Input should be a valid dictionary")
    if tool.get("type") != "function":
        raise refused_field(f"{place}.type", "there are only tools of the type 'function'")
    if not isinstance(tool.get("name"), str):
        raise invalid_field(f"{place}.name", "missing", "Field required")
    members = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in members if tool.get(name) is not None}}


def _tool_choice(choice: Any) -> Any:
    """Return a choice of tools as a chat has it."""
    if choice in ("none", "required"):
        return choice
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise refused_field("tool_choice", "it is none, auto, required, or {'type': 'function', 'name': NAME}")
    return {"type": "function", "function": {"name": choice["name"]}}


def _refuse_included(included: list[Any]) -> None:
    for each in included:
        if each != "reasoning.encrypted_content":  # no response here has reasoning
            raise refused_field("include", f"responses have nothing of {each!r}"[:200])


class _Messages:
    """The messages of a chat, from the items of an input."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.places: list[str] = []

    def add(self, place: str, message: dict[str, Any]) -> None:
        self.all.append(message)
        self.places.append(place)

    def add_input(self, given: Any) -> None:
        """Add what the field `input` has. Raises `ApiError`."""
        if isinstance(given, str):
            self.add("input", {"role": "user", "content": given})
            return
        if not isinstance(given, list):
            raise invalid_field("input", "string_type", "Input should be a valid string, or a list of items")
        if not given:
            raise invalid_field("input", "too_short", "List should have at least 1 item after validation, not 0")
        for number, item in enumerate(given):
            self._add_item(item, f"input.{number}")

    def _add_item(self, item: Any, place: str) -> None:
        if not isinstance(item, dict):
            raise invalid_field(place, "model_attributes_type", "Input should be a valid dictionary")
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        if kind == "message":
            if item.get("role") not in _ROLES:
                raise invalid_field(f"{place}.role", "literal_error", f"Input should be one of {', '.join(_ROLES)}")
            self.add(place, {"role": item["role"], "content": _content(item.get("content"), place)})
        elif kind == "function_call":
            self._add_call(item, place)
        elif kind == "function_call_output":
            call_id = _text_member(item, "call_id", place)
            output = _content(item.get("output"), place, "output")
            self.add(place, {"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "item_reference":
            raise refused_field(place, "the server keeps no items: send the item itself")
        elif kind != "reasoning":  # what another server has thought has no place in a chat
            raise refused_field(f"{place}.type", f"there are no items of the type {kind!r}"[:200])

    def _add_call(self, item: dict[str, Any], place: str) -> None:
        """Add a call of a tool; those that follow each other belong to one message."""
        function = {name: _text_member(item, name, place) for name in ("name", "arguments")}
        call = {"id": _text_member(item, "call_id", place), "type": "function", "function": function}
        if self.all and self.all[-1]["role"] == "assistant":
            self.all[-1].setdefault("tool_calls", []).append(call)
        else:
            self.add(place, {"role": "assistant", "content": None, "tool_calls": [call]})


def _text_member(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid_field(f"{place}.{name}", "string_type", "Input should be a valid string")
    return value


def _content(content: Any, place: str, name: str = "content") -> Any:
    """Return the content of a message as a chat has it: a text, or parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_field(f"{place}.{name}", "string_type", "Input should be a valid string, or a list of parts")
    return [_part(part, f"{place}.{name}.{number}") for number, part in enumerate(content)]


def _part(part: Any, place: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise invalid_field(place, "model_attributes_type", "Input should be a valid dictionary")
    kind = part.get("type")
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": _text_member(part, "text", place)}
    if kind == "refusal":
        return {"type": "refusal", "refusal": _text_member(part, "refusal", place)}
    if kind == "input_image":
        if not isinstance(part.get("image_url"), str):
            raise refused_field(place, "an image is given by its 'image_url', the server keeps no files")
        image = {"url": part["image_url"]} | ({"detail": part["detail"]} if part.get("detail") else {})
        return {"type": "image_url", "image_url": image}
    if kind == "input_file":
        if part.get("file_id") or part.get("file_url"):
            raise refused_field(place, "a file is given by its 'file_data', the server keeps and fetches no files")
        return {"type": "file", "file": {name: part[name] for name in ("file_data", "filename") if part.get(name)}}
    raise invalid_field(f"{place}.type", "literal_error", "Input should be input_text, output_text, input_image or "
                        "input_file")  # fmt: skip
