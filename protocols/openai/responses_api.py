"""Responses of the Responses API: its objects and events, from what a chat has made. Pure.

`ResponseBody` and `ResponseEvents` stand around the receivers of a chat and read what those have made, so that whatever
a model can do in a chat, such as calls of tools, it can do here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from kernel.errors import InternalError
from protocols.openai.errors import error_members
from protocols.openai.responses import Receiver

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from protocols.openai.choices import Usage
    from protocols.openai.pieces import Piece
    from protocols.openai.plans import GenerationPlan
    from protocols.openai.responses import Identity, ReadyBody, ReadyEvents, TextBody, TextEvents

_encode = msgspec.json.Encoder().encode

#: What a response repeats stays JSON: only the places of the members are looked for.
_repeated_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct):
    """A message, or what a chunk adds to it."""

    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Message = msgspec.field(default_factory=_Message)
    message: _Message = msgspec.field(default_factory=_Message)
    finish_reason: str | None = None


class _ChatUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ChatPart(msgspec.Struct):
    """A chunk, or a whole body."""

    choices: list[_Choice] = []
    usage: _ChatUsage | None = None


_chat_decoder = msgspec.json.Decoder(_ChatPart)


def _decoded(text: bytes) -> _ChatPart:
    try:
        return _chat_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _raise_not_a_chat(error)


def _raise_not_a_chat(error: Exception) -> NoReturn:
    raise InternalError(f"the model's output 'openai_response' is no chunk or body of a chat: {error}") from None


# ---- objects ---------------------------------------------------------------------------------


def _response(
    plan: GenerationPlan,
    identity: Identity,
    status: str,
    output: list[dict[str, Any]],
    usage: Usage | _ChatUsage | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the object `response`."""
    return {
        "id": identity.id,
        "object": "response",
        "created_at": identity.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": identity.model,
        "output": output,
        "usage": None if usage is None else _usage(usage),
        **_repeated_decoder.decode(plan.repeated),
        **more,
    }


def _usage(usage: Usage | _ChatUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _outcome(finish_reason: str) -> tuple[str, dict[str, str] | None]:
    """Return the status of a response, and why it is incomplete."""
    if finish_reason == "length":
        return "incomplete", {"reason": "max_output_tokens"}
    if finish_reason == "content_filter":
        return "incomplete", {"reason": "content_filter"}
    return "completed", None


def _item_id(kind: str, identity: Identity, number: int) -> str:
    return f"{kind}_{identity.id.removeprefix('resp_')}{number}"


#: The kinds of parts: their member with the text, and what their events begin with.
_TEXT, _REFUSAL = "output_text", "refusal"
_MEMBER = {_TEXT: "text", _REFUSAL: "refusal"}


def _part_object(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == _TEXT else {}
    return {"type": kind, _MEMBER[kind]: text, **more}


def _message_item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _call_item(item_id: str, status: str, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": item_id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
        "arguments": arguments,
    }  # fmt: skip


class _AroundChat(Receiver):
    """Lets the receiver of a chat take what comes."""

    def __init__(self, chat: Receiver, plan: GenerationPlan, identity: Identity) -> None:
        self._receiver = chat
        self._plan = plan
        self._identity = identity

    def add(self, number: int, piece: Piece) -> None:
        self._receiver.add(number, piece)

    def end(self, number: int) -> None:
        self._receiver.end(number)

    def is_stopped(self, number: int) -> bool:
        return self._receiver.is_stopped(number)

    def is_finished(self, number: int) -> bool:
        return self._receiver.is_finished(number)


class ResponseBody(_AroundChat):
    """The body of a response that is no stream, from that of a chat."""

    def __init__(self, chat: TextBody | ReadyBody, plan: GenerationPlan, identity: Identity) -> None:
        super().__init__(chat, plan, identity)
        self._chat = chat

    @property
    def byte_size(self) -> int:
        return self._chat.byte_size

    def body(self) -> bytes:
        """Return the body. Raises `InternalError` if the model has sent none."""
        part = _decoded(self._chat.body())
        choice = part.choices[0] if part.choices else _Choice()
        identity, message = self._identity, choice.message
        status, details = _outcome(choice.finish_reason or "stop")
        output: list[dict[str, Any]] = []
        if message.refusal:
            content = [_part_object(_REFUSAL, message.refusal)]
            output.append(_message_item(_item_id("msg", identity, 0), status, content))
        elif message.content or not message.tool_calls:
            content = [_part_object(_TEXT, message.content or "")]
            output.append(_message_item(_item_id("msg", identity, 0), status, content))
        for call in message.tool_calls or ():
            item_id = _item_id("fc", identity, len(output))
            name, arguments = call.function.name or "", call.function.arguments or ""
            output.append(_call_item(item_id, "completed", call.id or item_id, name, arguments))
        return _encode(_response(self._plan, identity, status, output, part.usage, incomplete_details=details))


# ---- events ----------------------------------------------------------------------------------


class _OpenItem:
    """An item whose deltas come."""

    def __init__(self, number: int, item_id: str) -> None:
        self.number = number
        self.id = item_id
        self.kind = ""  # of its part, for a message
        self.call_id = self.name = ""
        self.texts: list[str] = []


class ResponseEvents(_AroundChat):
    """The events of a stream, from the chunks of a chat.

    The events that end an item have its whole text, which counts in the budget until then.
    """

    def __init__(self, chat: TextEvents | ReadyEvents, plan: GenerationPlan, identity: Identity) -> None:
        super().__init__(chat, plan, identity)
        self._chat = chat
        #: How many bytes the texts take.
        self.byte_size = 0
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._item: _OpenItem | None = None
        self._call_index = -1
        self._finish_reason = ""
        self._usage: _ChatUsage | None = None
        self._parts: list[bytes] = []

    def take(self) -> bytes:
        """Return the events that were made since the last call. The first call begins the stream."""
        self._begin()
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def add(self, number: int, piece: Piece) -> None:
        self._chat.add(number, piece)
        self._take_chunks()

    def end(self, number: int) -> None:
        self._chat.end(number)
        self._take_chunks()

    def end_stream(self) -> None:
        """The model sends no more."""
        self._chat.end_stream()
        self._take_chunks()

    def _begin(self) -> None:
        if not self._sequence:
            begun = self._object("in_progress")
            self._event("response.created", response=begun)
            self._event("response.in_progress", response=begun)

    def _take_chunks(self) -> None:
        """Make events of what the chat has made. Raises `InternalError`."""
        self._begin()
        for event in self._chat.take().split(b"\n\n"):
            if event == b"data: [DONE]":
                self._complete()
            elif event:
                self._take_chunk(_decoded(event[len(b"data: ") :]))

    def failure(self, error: ServingError) -> bytes:
        """Return the event that ends a stream with `error`."""
        members = error_members(error)
        code = "rate_limit_exceeded" if members["type"] == "rate_limit_error" else "server_error"
        response = self._object("failed", error={"code": code, "message": members["message"]})
        self._event("response.failed", response=response)
        return self._parts.pop()

    def _object(self, status: str, **more: Any) -> dict[str, Any]:
        return _response(self._plan, self._identity, status, self._output, self._usage, **more)

    def _event(self, kind: str, **members: Any) -> None:
        text = _encode({"type": kind, "sequence_number": self._sequence, **members})
        self._sequence += 1
        self._parts.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), text))

    def _take_chunk(self, chunk: _ChatPart) -> None:
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            if delta.content:
                self._add_text(_TEXT, delta.content)
            if delta.refusal:
                self._add_text(_REFUSAL, delta.refusal)
            for call in delta.tool_calls or ():
                self._add_call(call)
            if choice.finish_reason:
                self._finish_reason = choice.finish_reason

    def _begin_item(self, kind: str) -> _OpenItem:
        self._end_item("completed")
        number = len(self._output)
        self._item = _OpenItem(number, _item_id(kind, self._identity, number))
        return self._item

    def _add_text(self, kind: str, text: str) -> None:
        item = self._item
        if item is None or item.kind != kind:
            item = self._begin_item("msg")
            item.kind = kind
            self._event(
                "response.output_item.added",
                output_index=item.number,
                item=_message_item(item.id, "in_progress", []),
            )
            self._part_event("response.content_part.added", item, part=_part_object(kind, ""))
        if not text:
            return
        self._note(item, text)
        logprobs: dict[str, Any] = {"logprobs": []} if kind == _TEXT else {}
        self._part_event(f"response.{kind}.delta", item, delta=text, **logprobs)

    def _part_event(self, event: str, item: _OpenItem, **members: Any) -> None:
        self._event(event, item_id=item.id, output_index=item.number, content_index=0, **members)

    def _note(self, item: _OpenItem, text: str) -> None:
        item.texts.append(text)
        self.byte_size += len(text)

    def _add_call(self, call: _ToolCall) -> None:
        item = self._item
        if item is None or item.kind or call.index != self._call_index:
            self._call_index = call.index
            item = self._begin_item("fc")
            item.call_id, item.name = call.id or item.id, call.function.name or ""
            self._event(
                "response.output_item.added",
                output_index=item.number,
                item=_call_item(item.id, "in_progress", item.call_id, item.name, ""),
            )
        if call.function.arguments:
            self._note(item, call.function.arguments)
            self._event(
                "response.function_call_arguments.delta",
                item_id=item.id,
                output_index=item.number,
                delta=call.function.arguments,
            )

    def _end_item(self, status: str) -> None:
        item, self._item = self._item, None
        if item is None:
            return
        text = "".join(item.texts)
        if item.kind:
            logprobs: dict[str, Any] = {"logprobs": []} if item.kind == _TEXT else {}
            self._part_event(f"response.{item.kind}.done", item, **{_MEMBER[item.kind]: text}, **logprobs)
            part = _part_object(item.kind, text)
            self._part_event("response.content_part.done", item, part=part)
            whole = _message_item(item.id, status, [part])
        else:
            whole = _call_item(item.id, status, item.call_id, item.name, text)
            self._event(
                "response.function_call_arguments.done",
                item_id=item.id,
                output_index=item.number,
                name=item.name,
                arguments=text,
            )
        self._output.append(whole)
        self._event("response.output_item.done", output_index=item.number, item=whole)

    def _complete(self) -> None:
        """The chat has ended."""
        status, details = _outcome(self._finish_reason or "stop")
        if self._item is None and not self._output:
            self._add_text(_TEXT, "")
        self._end_item(status)
        self._event(f"response.{status}", response=self._object(status, incomplete_details=details))
