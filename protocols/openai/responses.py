"""What becomes of the responses of a model: events of a stream, or one body. Pure.

Four receivers take the responses: each makes events or a body, from text or from what the model has made itself. Behind
them is how bodies and chunks are written; what is the same in all chunks of a stream is encoded once.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError
from protocols.http.json.document import UNDECODABLE, member_texts
from protocols.openai.choices import Choices
from protocols.openai.errors import error_event
from protocols.openai.logprobs import TokenLogprobs
from protocols.openai.tools import FoundCall, NamedCall, ToolText, new_parser

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from protocols.openai.choices import Usage
    from protocols.openai.pieces import Piece
    from protocols.openai.plans import GenerationPlan
    from protocols.openai.tools import Found

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class _UsageChunk(msgspec.Struct):
    #: Of each choice nothing is read.
    choices: list[msgspec.Raw]
    usage: dict[str, msgspec.Raw] | None = None


_usage_decoder = msgspec.json.Decoder(_UsageChunk)


class Identity(msgspec.Struct, frozen=True):
    """What all chunks of a response have in common."""

    id: str
    #: In seconds since the epoch.
    created: int
    model: str


#: How many bytes of text become chunks before other clients are served; fewer if calls of tools are looked for in the
#: text. Each is the work of a millisecond.
TAKEN_BYTE_SIZE, TAKEN_WITH_TOOLS = 64 << 10, 8 << 10

#: About how many bytes a kept block of a text has.
_BLOCK_BYTE_SIZE = 64 << 10


class EncodedText:
    """A growing text, escaped for JSON, in blocks: a long text is never made or sent in one piece."""

    __slots__ = ("blocks", "byte_size")

    def __init__(self) -> None:
        self.blocks: list[bytearray] = []
        self.byte_size = 0

    def add(self, text: str) -> int:
        """Add more of the text, and return how many bytes that takes."""
        encoded = memoryview(_encode(text))[1:-1]
        if not self.blocks or len(self.blocks[-1]) >= _BLOCK_BYTE_SIZE:
            self.blocks.append(bytearray())
        self.blocks[-1] += encoded
        self.byte_size += len(encoded)
        return len(encoded)

    def quoted(self) -> list[bytes | bytearray]:
        """Return the parts of the text as a JSON string."""
        return [b'"', *self.blocks, b'"']


class Receiver:
    """Takes what comes of each choice, by its number: here of a model that makes its responses itself."""

    #: How many bytes of text may be taken before other clients are served.
    taken_byte_size = TAKEN_BYTE_SIZE
    #: Whether a response with a long text may be taken in parts.
    takes_parts = False
    #: Of a stream: whether `take` has more events than it has returned.
    has_more = False

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

    def tool_failures(self, number: int) -> int:
        """How often the text of the choice began like a call of a tool and was none."""
        return 0

    def is_plain(self, number: int) -> bool:
        """Whether `add_plain` may be called instead of `add`, until `add` or `end` is called."""
        return False

    def add_plain(self, number: int, text: str) -> None:
        """Take a response that is nothing but text and ends with a whole character."""
        raise NotImplementedError

    def failure(self, error: ServingError) -> bytes:
        """Return the event that ends a stream with `error`."""
        return error_event(error)


class _TextReceiver(Receiver):
    """Takes the text of each choice."""

    def __init__(self, plan: GenerationPlan) -> None:
        self._plan = plan
        self._choices = Choices(plan)
        #: What finds calls in the text of each choice; None for a request without tools.
        self._tools = _tools_of(plan)
        if self._tools is not None:
            self.taken_byte_size = TAKEN_WITH_TOOLS
        self._logprobs = None if plan.logprobs is None else TokenLogprobs(plan)
        self.takes_parts = self._logprobs is None  # they come with the text of their tokens

    def finish_reason(self, number: int) -> str:
        """Return why the choice has ended: a text with calls ends for them, unless the client has named the tool."""
        reason = self._choices.all[number].finish_reason
        if self._tools is not None and not self._plan.named_tool and self._tools[number].count and reason == "stop":
            return "tool_calls"
        return reason

    def is_stopped(self, number: int) -> bool:
        return self._choices.all[number].stopped

    def is_finished(self, number: int) -> bool:
        return bool(self._choices.all[number].finish_reason)

    def tool_failures(self, number: int) -> int:
        return 0 if self._tools is None else self._tools[number].failures


def _tools_of(plan: GenerationPlan) -> list[ToolText] | None:
    if plan.named_tool:
        return [ToolText(NamedCall(plan.named_tool)) for _ in range(plan.choices)]
    if plan.tool_parser:
        return [ToolText(new_parser(plan.tool_parser), only_first=plan.only_first_call) for _ in range(plan.choices)]
    return None


class TextEvents(_TextReceiver):
    """The events of a stream, of a model that sends text."""

    #: How many bytes are kept until the end of the stream.
    byte_size = 0

    def __init__(self, plan: GenerationPlan, identity: Identity) -> None:
        super().__init__(plan)
        self._writer = ChunkWriter(plan, identity)
        #: The choices whose first chunk was made; for completions there is none.
        self._begun = [not plan.api.is_chat] * plan.choices
        #: How many calls of each choice were sent.
        self._sent = [0] * plan.choices
        self._parts: list[bytes] = []

    def take(self) -> bytes:
        """Return the events that were made since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def add(self, number: int, piece: Piece) -> None:
        if not self._begun[number]:
            self._begin(number)
        if self._logprobs is not None and piece.logprobs and not self.is_finished(number):
            self._add_with_logprobs(number, piece, self._logprobs)
            return
        text = self._choices.all[number].add(piece)
        if text:
            self._send(number, text)

    def is_plain(self, number: int) -> bool:
        return self._tools is None and self._begun[number] and self._choices.all[number].is_plain

    def add_plain(self, number: int, text: str) -> None:
        self._writer.add_text(self._parts, number, text)

    def _add_with_logprobs(self, number: int, piece: Piece, logprobs: TokenLogprobs) -> None:
        """As `add`. Log probabilities come with the text of their tokens, or before it if the text is held back."""
        columns = logprobs.read(number, piece.logprobs)
        text = self._choices.all[number].add(piece)
        alone = text if self._tools is None else ""
        if columns:
            self._parts.append(self._writer.text(number, alone, logprobs.members([columns])))
        elif alone:
            self._parts.append(self._writer.text(number, alone))
        if text and self._tools is not None:
            self._send(number, text)

    def _send(self, number: int, text: str) -> None:
        if self._tools is None:
            self._parts.append(self._writer.text(number, text))
        else:
            self._send_found(number, self._tools[number].add(text))

    def _send_found(self, number: int, found: list[Found]) -> None:
        """Send text and calls, which are numbered in their order."""
        for each in found:
            if isinstance(each, str):
                self._parts.append(self._writer.text(number, each))
            elif isinstance(each, FoundCall):
                self._parts.append(self._writer.calls(number, {"index": self._sent[number], **call_members(each)}))
                self._sent[number] += 1
            else:
                more = {"index": self._sent[number] - 1, "function": {"arguments": each.text}}
                self._parts.append(self._writer.calls(number, more))

    def _begin(self, number: int) -> None:
        self._begun[number] = True
        self._parts.append(self._writer.role(number))

    def end(self, number: int) -> None:
        if not self._begun[number]:
            self._begin(number)
        choice = self._choices.all[number]
        if text := choice.end():
            self._send(number, text)
        if self._tools is not None:
            self._send_found(number, self._tools[number].end())
        self._parts.append(self._writer.finish(number, self.finish_reason(number)))

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
        self._texts = [EncodedText() for _ in range(plan.choices)]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in range(plan.choices)]
        #: Of each choice: the columns of log probabilities of each response.
        self._columns: list[list[list[bytes]]] = [[] for _ in range(plan.choices)]
        #: How many bytes the texts take.
        self.byte_size = 0

    def add(self, number: int, piece: Piece) -> None:
        if self._logprobs is not None and piece.logprobs and not self.is_finished(number):
            columns = self._logprobs.read(number, piece.logprobs)
            self._columns[number] += [columns] if columns else []
            self.byte_size += sum(map(len, columns))
        self._append(number, self._choices.all[number].add(piece))

    def _append(self, number: int, text: str) -> None:
        if not text:
            return
        if self._tools is None:
            self._add_text(number, text)
        else:
            self._take(number, self._tools[number].add(text))

    def _add_text(self, number: int, text: str) -> None:
        self.byte_size += self._texts[number].add(text)

    def _take(self, number: int, found: list[Found]) -> None:
        for each in found:
            if isinstance(each, str):
                self._add_text(number, each)
            elif isinstance(each, FoundCall):
                self._calls[number].append({**call_members(each), "parts": [each.arguments]})
                self.byte_size += len(each.arguments)
            else:
                self._calls[number][-1]["parts"].append(each.text)
                self.byte_size += len(each.text)

    def end(self, number: int) -> None:
        self._append(number, self._choices.all[number].end())
        if self._tools is not None:
            self._take(number, self._tools[number].end())

    def text(self, number: int) -> EncodedText:
        """Return the text of a choice."""
        return self._texts[number]

    def calls(self, number: int) -> list[dict[str, Any]]:
        """Return the calls of a choice that has ended, as clients read them."""
        calls = self._calls[number]
        for call in calls:
            if (parts := call.pop("parts", None)) is not None:
                call["function"]["arguments"] = "".join(parts)
        return calls

    def usage(self) -> Usage | None:
        """Return the usage: all choices have ended."""
        return self._choices.usage()

    def parts(self) -> list[bytes | bytearray]:
        """Return the parts of the body: all choices have ended."""
        identity = self._identity
        kind = "chat.completion" if self._plan.api.is_chat else "text_completion"
        head = _encode({"id": identity.id, "object": kind, "created": identity.created, "model": identity.model})
        found: list[bytes | bytearray] = [head[:-1], b',"system_fingerprint":null,"choices":[']
        for number in range(self._plan.choices):
            found += [b',{"index":%d,' % number if number else b'{"index":0,', *self._content(number)]
            logprobs = b"null"
            if self._logprobs is not None:
                logprobs = self._logprobs.members(self._columns[number])
            found += [b',"logprobs":', logprobs, b',"finish_reason":', _encode(self.finish_reason(number)), b"}"]
        return [*found, b'],"usage":', _encode(self.usage()), b"}"]

    def _content(self, number: int) -> list[bytes | bytearray]:
        """Return the parts of the message or of the text of a choice."""
        text, calls = self._texts[number], self.calls(number)
        content = [b"null"] if calls and not text.byte_size else text.quoted()
        if not self._plan.api.is_chat:
            return [b'"text":', *content]
        more = b',"tool_calls":' + _encode(calls) if calls else b""
        return [b'"message":{"role":"assistant","content":', *content, b',"refusal":null', more, b"}"]

    def body(self) -> bytes:
        """As `parts`, in one piece."""
        return b"".join(self.parts())


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

    def parts(self) -> list[bytes | bytearray]:
        """As `body`."""
        return [self.body()]

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
        self._before_logprobs = b'%b,"logprobs":' % end
        self._after_logprobs = b',"finish_reason":null}]%b}\n\n' % self._usage
        self._end = b"%bnull%b" % (self._before_logprobs, self._after_logprobs)

    def role(self, number: int) -> bytes:
        """Return the first chunk of a choice of a chat."""
        delta = b'"delta":{"role":"assistant","content":""}'
        return b'%b{"index":%d,%b,"logprobs":null,"finish_reason":null}]%b}\n\n' % (
            self._head, number, delta, self._usage
        )  # fmt: skip

    def text(self, number: int, text: str, logprobs: bytes = b"") -> bytes:
        """Return the chunk with more text of a choice, and the log probabilities of its tokens."""
        end = self._end if not logprobs else self._before_logprobs + logprobs + self._after_logprobs
        return self._begins[number] + _encode(text) + end

    def add_text(self, parts: list[bytes], number: int, text: str) -> None:
        """As `text`, in parts that are joined with those of other chunks."""
        parts += (self._begins[number], _encode(text), self._end)

    def calls(self, number: int, call: dict[str, Any]) -> bytes:
        """Return the chunk with a call of a tool, or with more of its arguments."""
        return b'%b{"index":%d,"delta":{"tool_calls":[%b]},"logprobs":null,"finish_reason":null}]%b}\n\n' % (
            self._head, number, _encode(call), self._usage
        )  # fmt: skip

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
        """Return the event for a chunk that the model has made. Raises `InternalError`.

        It is empty for a chunk that has only the usage, if the client has not asked for it.
        """
        if not self._usage and b'"usage"' in text and _has_only_usage(text):
            return b""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return b"data: %b\n\n" % with_identity(text, self._identity, kind)


def _has_only_usage(text: bytes) -> bool:
    """Whether a chunk has a usage and no choice."""
    try:
        chunk = _usage_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # `with_identity` says what is wrong
    return not chunk.choices and bool(chunk.usage)


def call_members(call: FoundCall) -> dict[str, Any]:
    """Return a call as clients read it. Mistral's templates insist on ids of nine letters and digits."""
    return {
        "id": uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


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
