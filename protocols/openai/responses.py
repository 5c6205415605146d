"""What becomes of the responses of a model: events of a stream, or one body. Pure.

Four receivers take the responses: each makes events or a body, from text or from what the model has made itself. Behind
them is how bodies and chunks are written; what is the same in all chunks of a stream is encoded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError
from protocols.http.json.document import UNDECODABLE, member_texts
from protocols.openai.choices import Choices
from protocols.openai.errors import error_event

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from protocols.openai.choices import Usage
    from protocols.openai.dialects import Piece
    from protocols.openai.plans import GenerationPlan

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class Identity(msgspec.Struct, frozen=True):
    """What all chunks of a response have in common."""

    id: str
    #: In seconds since the epoch.
    created: int
    model: str


class Receiver:
    """Takes what comes of each choice, by its number: here of a model that makes its responses itself."""

    def add(self, number: int, piece: Piece) -> None:
        """Take a response. Raises `InternalError` if it is not what the dialect has."""
        raise NotImplementedError

    def end(self, number: int) -> None:
        """The model sends no more of this choice."""

    def is_stopped(self, number: int) -> bool:
        """Whether the model need not go on with this choice: a stop word has come."""
        return False

    def is_finished(self, number: int) -> bool:
        """Whether the text of the choice is complete, so that a later failure changes nothing."""
        return False

    def failure(self, error: ServingError) -> bytes:
        """Return the event that ends a stream with `error`."""
        return error_event(error)


class _TextReceiver(Receiver):
    """Takes the text of each choice."""

    def __init__(self, plan: GenerationPlan) -> None:
        self._plan = plan
        self._choices = Choices(plan)

    def is_stopped(self, number: int) -> bool:
        return self._choices.all[number].stopped

    def is_finished(self, number: int) -> bool:
        return bool(self._choices.all[number].finish_reason)


class TextEvents(_TextReceiver):
    """The events of a stream, of a model that sends text."""

    #: How many bytes are kept until the end of the stream.
    byte_size = 0

    def __init__(self, plan: GenerationPlan, identity: Identity) -> None:
        super().__init__(plan)
        self._writer = ChunkWriter(plan, identity)
        #: The choices whose first chunk was made; for completions there is none.
        self._begun = [not plan.api.is_chat] * plan.choices
        self._parts: list[bytes] = []

    def take(self) -> bytes:
        """Return the events that were made since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def add(self, number: int, piece: Piece) -> None:
        if not self._begun[number]:
            self._begin(number)
        text = self._choices.all[number].add(piece)
        if text:
            self._parts.append(self._writer.text(number, text))

    def _begin(self, number: int) -> None:
        self._begun[number] = True
        self._parts.append(self._writer.role(number))

    def end(self, number: int) -> None:
        if not self._begun[number]:
            self._begin(number)
        choice = self._choices.all[number]
        if text := choice.end():
            self._parts.append(self._writer.text(number, text))
        self._parts.append(self._writer.finish(number, choice.finish_reason))

    def end_stream(self) -> None:
        """All choices have ended."""
        if self._plan.include_usage:
            self._parts.append(self._writer.usage(self._choices.usage()))
        self._parts.append(DONE)


class ReadyEvents(Receiver):
    """The events of a stream, of a model that makes its chunks itself."""

    #: As in `TextEvents`.
    byte_size = 0

    def __init__(self, plan: GenerationPlan, identity: Identity) -> None:
        self._writer = ChunkWriter(plan, identity)
        self._parts: list[bytes] = []

    def take(self) -> bytes:
        """Return the events that were made since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def add(self, number: int, piece: Piece) -> None:
        self._parts.append(self._writer.ready(piece.text))

    def end_stream(self) -> None:
        """The model sends no more."""
        self._parts.append(DONE)


class TextBody(_TextReceiver):
    """The body of a response that is not a stream, of a model that sends text."""

    def __init__(self, plan: GenerationPlan, identity: Identity) -> None:
        super().__init__(plan)
        self._identity = identity
        self._texts: list[list[str]] = [[] for _ in range(plan.choices)]
        #: How many bytes the texts take.
        self.byte_size = 0

    def add(self, number: int, piece: Piece) -> None:
        self._append(number, self._choices.all[number].add(piece))

    def _append(self, number: int, text: str) -> None:
        if text:
            self._texts[number].append(text)
            self.byte_size += len(text)

    def end(self, number: int) -> None:
        self._append(number, self._choices.all[number].end())

    def body(self) -> bytes:
        """Return the body: all choices have ended."""
        texts = [
            ("".join(parts), choice.finish_reason) for parts, choice in zip(self._texts, self._choices.all, strict=True)
        ]
        return whole_body(self._plan, self._identity, texts, self._choices.usage())


class ReadyBody(Receiver):
    """The body of a response that is not a stream, of a model that makes it itself."""

    def __init__(self, plan: GenerationPlan, identity: Identity) -> None:
        self._plan = plan
        self._identity = identity
        self._body = b""

    @property
    def byte_size(self) -> int:
        return len(self._body)

    def add(self, number: int, piece: Piece) -> None:
        if self._body:
            raise InternalError(
                "the model has sent several responses to a request that is not a stream, expected one whole body"
            )
        kind = "chat.completion" if self._plan.api.is_chat else "text_completion"
        self._body = with_identity(piece.text, self._identity, kind)

    def body(self) -> bytes:
        """Return the body. Raises `InternalError` if the model has sent none."""
        if not self._body:
            raise InternalError("the model has sent no response, expected one whole body")
        return self._body


class ChunkWriter:
    """Makes the events of one stream."""

    def __init__(self, plan: GenerationPlan, identity: Identity) -> None:
        self._chat = plan.api.is_chat
        self._identity = identity
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = _encode({"id": identity.id, "object": kind, "created": identity.created, "model": identity.model})
        self._head = b'data: %b,"system_fingerprint":null,"choices":[' % head[:-1]
        self._usage = b',"usage":null' if plan.include_usage else b""
        middle = b'"delta":{"content":' if self._chat else b'"text":'
        self._begins = [b'%b{"index":%d,%b' % (self._head, number, middle) for number in range(plan.choices)]
        end = b"}" if self._chat else b""
        self._end = b'%b,"logprobs":null,"finish_reason":null}]%b}\n\n' % (end, self._usage)

    def role(self, number: int) -> bytes:
        """Return the first chunk of a choice of a chat."""
        delta = b'"delta":{"role":"assistant","content":""}'
        return b'%b{"index":%d,%b,"logprobs":null,"finish_reason":null}]%b}\n\n' % (
            self._head, number, delta, self._usage
        )  # fmt: skip

    def text(self, number: int, text: str) -> bytes:
        """Return the chunk with more text of a choice."""
        return self._begins[number] + _encode(text) + self._end

    def finish(self, number: int, reason: str) -> bytes:
        """Return the last chunk of a choice."""
        last = b'"delta":{}' if self._chat else b'"text":""'
        return b'%b{"index":%d,%b,"logprobs":null,"finish_reason":%b}]%b}\n\n' % (
            self._head, number, last, _encode(reason), self._usage
        )  # fmt: skip

    def usage(self, usage: Usage | None) -> bytes:
        """Return the chunk with the usage, null if the model did not say it."""
        return b'%b],"usage":%b}\n\n' % (self._head, _encode(usage))

    def ready(self, text: bytes) -> bytes:
        """Return the event for a chunk that the model has made. Raises `InternalError`."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return b"data: %b\n\n" % with_identity(text, self._identity, kind)


def whole_body(plan: GenerationPlan, identity: Identity, texts: list[tuple[str, str]], usage: Usage | None) -> bytes:
    """Return the body of a response that is not a stream. `texts` has text and finish_reason of each choice."""
    choices: list[dict[str, Any]] = []
    for number, (text, reason) in enumerate(texts):
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if plan.api.is_chat else {"text": text}
        )
        choices.append({"index": number, **content, "logprobs": None, "finish_reason": reason})
    return _encode(
        {
            "id": identity.id,
            "object": "chat.completion" if plan.api.is_chat else "text_completion",
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": None,
            "choices": choices,
            "usage": usage,
        }
    )


def with_identity(text: bytes, identity: Identity, kind: str) -> bytes:
    """Return a body or chunk that a model has made, with the identity of the response. Raises `InternalError`.

    JSON has no line ends outside of its texts after that, so that it is one line of an event.
    """
    try:
        members = member_texts(text)
    except UNDECODABLE as error:
        raise InternalError(f"the model's output 'openai_response' is not a JSON object: {error}") from None
    if "choices" not in members:
        raise InternalError("the model's output 'openai_response' is a JSON object without 'choices'")
    ours = {"id": identity.id, "object": kind, "created": identity.created, "model": identity.model}
    encoded = _encode({**ours, **{name: value for name, value in members.items() if name not in ours}})
    # White space of the model's own text may contain line ends, which would end the event.
    return encoded.replace(b"\r", b" ").replace(b"\n", b" ")
