"""Bodies and chunks of responses as bytes. What is the same in all chunks of a stream is encoded once. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError

if TYPE_CHECKING:
    from protocols.openai.requests.plans import GenerationPlan
    from protocols.openai.responses.choices import Usage

_encode = msgspec.json.Encoder().encode
_ready_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

DONE = b"data: [DONE]\n\n"


class Identity(msgspec.Struct, frozen=True):
    """What all chunks of a response have in common."""

    id: str
    #: In seconds since the epoch.
    created: int
    model: str


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
        members = _ready_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InternalError(f"the model's output 'openai_response' is not a JSON object: {error}") from None
    if "choices" not in members:
        raise InternalError("the model's output 'openai_response' is a JSON object without 'choices'")
    ours = {"id": identity.id, "object": kind, "created": identity.created, "model": identity.model}
    encoded = _encode({**ours, **{name: value for name, value in members.items() if name not in ours}})
    # White space of the model's own text may contain line ends, which would end the event.
    return encoded.replace(b"\r", b" ").replace(b"\n", b" ")
