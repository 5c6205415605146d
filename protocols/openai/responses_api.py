"""Responses of the Responses API: its objects and events, from what a chat has made. Pure.

`ResponseBody` and `ResponseEvents` stand around the receivers of a chat and read what those have made, so that whatever
a model can do in a chat, such as calls of tools, it can do here.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from kernel.errors import InternalError
from protocols.openai.errors import error_members
from protocols.openai.responses import TAKEN_BYTE_SIZE, EncodedText, ReadyBody, Receiver

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.errors import ServingError
    from protocols.openai.choices import Usage
    from protocols.openai.pieces import Piece
    from protocols.openai.plans import GenerationPlan
    from protocols.openai.responses import Identity, ReadyEvents, TextBody, TextEvents

    #: JSON in parts. A long text in it is in blocks, never in one piece.
    Parts = list[bytes | bytearray]

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
    output: Parts,
    usage: Usage | _ChatUsage | None = None,
    **more: Any,
) -> Parts:
    """Return the object `response`; `output` are its items, with commas between them."""
    head = {
        "id": identity.id,
        "object": "response",
        "created_at": identity.created,
        "status": status,
        "model": identity.model,
    }
    tail = {
        "error": None,
        "incomplete_details": None,
        "usage": None if usage is None else _usage(usage),
        **_repeated_decoder.decode(plan.repeated),
        **more,
    }
    return [_encode(head)[:-1], b',"output":[', *output, b"],", _encode(tail)[1:]]


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


def _with(members: dict[str, Any], name: str, value: Parts) -> Parts:
    """Return an object with these members, and a last one, whose value is JSON."""
    return [_encode(members)[:-1], b',"%b":' % name.encode(), *value, b"}"]


def _part_object(kind: str, text: EncodedText) -> Parts:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == _TEXT else {}
    return _with({"type": kind, **more}, _MEMBER[kind], text.quoted())


def _message_item(item_id: str, status: str, content: Parts) -> Parts:
    message = {"id": item_id, "type": "message", "role": "assistant", "status": status}
    return _with(message, "content", [b"[", *content, b"]"])


def _call_item(item_id: str, status: str, call_id: str, name: str, arguments: EncodedText) -> Parts:
    call = {"id": item_id, "type": "function_call", "status": status, "call_id": call_id, "name": name}
    return _with(call, "arguments", arguments.quoted())


def _encoded(text: str) -> EncodedText:
    found = EncodedText()
    found.add(text)
    return found


class _AroundChat(Receiver):
    """Lets the receiver of a chat take what comes."""

    def __init__(self, chat: Receiver, plan: GenerationPlan, identity: Identity) -> None:
        self._receiver = chat
        self.takes_parts, self.taken_byte_size = chat.takes_parts, chat.taken_byte_size
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

    def tool_failures(self, number: int) -> int:
        return self._receiver.tool_failures(number)


class ResponseBody(_AroundChat):
    """The body of a response that is no stream, from that of a chat."""

    def __init__(self, chat: TextBody | ReadyBody, plan: GenerationPlan, identity: Identity) -> None:
        super().__init__(chat, plan, identity)
        self._chat = chat

    @property
    def byte_size(self) -> int:
        return self._chat.byte_size

    def parts(self) -> Parts:
        """Return the parts of the body. Raises `InternalError` if the model has sent none."""
        if isinstance(self._chat, ReadyBody):
            return self._of_body(_decoded(self._chat.body()))
        chat = self._chat
        status, _ = _outcome(chat.finish_reason(0))
        calls = [(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in chat.calls(0)]
        items: list[Parts] = []
        if (text := chat.text(0)).byte_size or not calls:
            items.append(self._message(status, _TEXT, text))
        return self._whole(chat.finish_reason(0), items, calls, chat.usage())

    def _of_body(self, part: _ChatPart) -> Parts:
        """Return the parts of a body that the model has made itself."""
        choice = part.choices[0] if part.choices else _Choice()
        message, reason = choice.message, choice.finish_reason or "stop"
        status, _ = _outcome(reason)
        items: list[Parts] = []
        if message.refusal:
            items.append(self._message(status, _REFUSAL, _encoded(message.refusal)))
        elif message.content or not message.tool_calls:
            items.append(self._message(status, _TEXT, _encoded(message.content or "")))
        calls = [
            (each.id or "", each.function.name or "", each.function.arguments or "")
            for each in message.tool_calls or ()
        ]
        return self._whole(reason, items, calls, part.usage)

    def _message(self, status: str, kind: str, text: EncodedText) -> Parts:
        return _message_item(_item_id("msg", self._identity, 0), status, _part_object(kind, text))

    def _whole(
        self,
        finish_reason: str,
        items: list[Parts],
        calls: Iterable[tuple[str, str, str]],
        usage: Usage | _ChatUsage | None,
    ) -> Parts:
        """Return the parts; `items` grow by the calls, each an id, a name and arguments."""
        for call_id, name, arguments in calls:
            item_id = _item_id("fc", self._identity, len(items))
            items.append(_call_item(item_id, "completed", call_id or item_id, name, _encoded(arguments)))
        status, details = _outcome(finish_reason)
        output = _joined(items)
        return _response(self._plan, self._identity, status, output, usage, incomplete_details=details)

    def body(self) -> bytes:
        """As `parts`, in one piece."""
        return b"".join(self.parts())


def _joined(items: Iterable[Parts]) -> Parts:
    """Return items with commas between them."""
    found: Parts = []
    for item in items:
        found += [b",", *item] if found else item
    return found


# ---- events ----------------------------------------------------------------------------------


class _OpenItem:
    """An item whose deltas come."""

    def __init__(self, number: int, item_id: str) -> None:
        self.number = number
        self.id = item_id
        self.kind = ""  # of its part, for a message
        self.call_id = self.name = ""
        self.text = EncodedText()


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
        self._output: list[Parts] = []
        self._item: _OpenItem | None = None
        self._call_index = -1
        self._finish_reason = ""
        self._usage: _ChatUsage | None = None
        self._parts: deque[bytes | bytearray] = deque()

    @property
    def has_more(self) -> bool:  # type: ignore[override]  # it changes
        return bool(self._parts)

    def take(self) -> bytes:
        """Return the events that were made since the last call, or some of them. The first call begins the stream."""
        self._begin()
        parts, taken, byte_size = self._parts, [], 0
        while parts and byte_size < TAKEN_BYTE_SIZE:
            taken.append(parts.popleft())
            byte_size += len(taken[-1])
        return b"".join(taken)

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
            for event in ("response.created", "response.in_progress"):
                self._event(event, ("response", self._object("in_progress")))

    def _take_chunks(self) -> None:
        """Make events of what the chat has made. Raises `InternalError`."""
        self._begin()
        for event in self._chat.take().split(b"\n\n"):
            if event == b"data: [DONE]":
                self._complete()
            elif event:
                self._take_chunk(_decoded(event[len(b"data: ") :]))

    def failure(self, error: ServingError) -> bytes:
        """Return the event that ends a stream with `error`, or its beginning: `take` has the rest."""
        members = error_members(error)
        code = "rate_limit_exceeded" if members["type"] == "rate_limit_error" else "server_error"
        failed = self._object("failed", error={"code": code, "message": members["message"]})
        self._event("response.failed", ("response", failed))
        return self.take()

    def _object(self, status: str, **more: Any) -> Parts:
        return _response(self._plan, self._identity, status, _joined(self._output), self._usage, **more)

    def _event(self, event: str, last: tuple[str, Parts] | None = None, **members: Any) -> None:
        """Make an event. `last` is the name and the value of one more member, which may be long."""
        begun = {"type": event, "sequence_number": self._sequence, **members}
        self._sequence += 1
        self._parts.append(b"event: %b\ndata: " % event.encode())
        self._parts += [_encode(begun)] if last is None else _with(begun, *last)
        self._parts.append(b"\n\n")

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
            begun = _message_item(item.id, "in_progress", [])
            self._event("response.output_item.added", ("item", begun), output_index=item.number)
            self._part_event("response.content_part.added", item, ("part", _part_object(kind, EncodedText())))
        if not text:
            return
        self._note(item, text)
        logprobs: dict[str, Any] = {"logprobs": []} if kind == _TEXT else {}
        self._part_event(f"response.{kind}.delta", item, delta=text, **logprobs)

    def _part_event(self, event: str, item: _OpenItem, last: tuple[str, Parts] | None = None, **members: Any) -> None:
        self._event(event, last, item_id=item.id, output_index=item.number, content_index=0, **members)

    def _note(self, item: _OpenItem, text: str) -> None:
        self.byte_size += item.text.add(text)

    def _add_call(self, call: _ToolCall) -> None:
        item = self._item
        if item is None or item.kind or call.index != self._call_index:
            self._call_index = call.index
            item = self._begin_item("fc")
            item.call_id, item.name = call.id or item.id, call.function.name or ""
            begun = _call_item(item.id, "in_progress", item.call_id, item.name, EncodedText())
            self._event("response.output_item.added", ("item", begun), output_index=item.number)
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
        if item.kind:
            logprobs: dict[str, Any] = {"logprobs": []} if item.kind == _TEXT else {}
            text = (_MEMBER[item.kind], item.text.quoted())
            self._part_event(f"response.{item.kind}.done", item, text, **logprobs)
            part = _part_object(item.kind, item.text)
            self._part_event("response.content_part.done", item, ("part", part))
            whole = _message_item(item.id, status, part)
        else:
            whole = _call_item(item.id, status, item.call_id, item.name, item.text)
            self._event(
                "response.function_call_arguments.done",
                ("arguments", item.text.quoted()),
                item_id=item.id,
                output_index=item.number,
                name=item.name,
            )
        self._output.append(whole)
        self._event("response.output_item.done", ("item", whole), output_index=item.number)

    def _complete(self) -> None:
        """The chat has ended."""
        status, details = _outcome(self._finish_reason or "stop")
        if self._item is None and not self._output:
            self._add_text(_TEXT, "")
        self._end_item(status)
        ended = self._object(status, incomplete_details=details)
        self._event(f"response.{status}", ("response", ended))
