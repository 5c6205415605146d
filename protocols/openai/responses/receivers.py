"""What becomes of the responses of a model: events of a stream, or one body. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernel.errors import InternalError
from protocols.openai.responses.bodies import DONE, ChunkWriter, Identity, whole_body, with_identity
from protocols.openai.responses.choices import Choices

if TYPE_CHECKING:
    from protocols.openai.dialects.pieces import Piece
    from protocols.openai.requests.plans import GenerationPlan


class Receiver(Protocol):
    """Takes what comes of each choice, by its number."""

    def add(self, number: int, piece: Piece) -> None:
        """Take a response. Raises `InternalError` if it is not what the dialect has."""

    def end(self, number: int) -> None:
        """The model sends no more of this choice."""

    def is_stopped(self, number: int) -> bool:
        """Whether the model need not go on with this choice: a stop word has come."""

    def is_finished(self, number: int) -> bool:
        """Whether the text of the choice is complete, so that a later failure changes nothing."""


class TextEvents:
    """The events of a stream, of a model that sends text. A `Receiver`."""

    def __init__(self, plan: GenerationPlan, identity: Identity) -> None:
        self._plan = plan
        self._writer = ChunkWriter(plan, identity)
        self._choices = Choices(plan)
        #: The choices whose first chunk was made; those of completions have none of their own.
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

    def is_stopped(self, number: int) -> bool:
        return self._choices.all[number].stopped

    def is_finished(self, number: int) -> bool:
        return bool(self._choices.all[number].finish_reason)

    def end_stream(self) -> None:
        """All choices have ended."""
        if self._plan.include_usage:
            self._parts.append(self._writer.usage(self._choices.usage()))
        self._parts.append(DONE)


class ReadyEvents:
    """The events of a stream, of a model that makes its chunks itself. A `Receiver`."""

    def __init__(self, plan: GenerationPlan, identity: Identity) -> None:
        self._writer = ChunkWriter(plan, identity)
        self._parts: list[bytes] = []

    def take(self) -> bytes:
        """Return the events that were made since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def add(self, number: int, piece: Piece) -> None:
        self._parts.append(self._writer.ready(piece.text))

    def end(self, number: int) -> None:
        """See `Receiver`: the model has made its last chunk itself."""

    def is_stopped(self, number: int) -> bool:
        return False

    def is_finished(self, number: int) -> bool:
        return False

    def end_stream(self) -> None:
        """The model sends no more."""
        self._parts.append(DONE)


class TextBody:
    """The body of a response that is not a stream, of a model that sends text. A `Receiver`."""

    def __init__(self, plan: GenerationPlan, identity: Identity) -> None:
        self._plan = plan
        self._identity = identity
        self._choices = Choices(plan)
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

    def is_stopped(self, number: int) -> bool:
        return self._choices.all[number].stopped

    def is_finished(self, number: int) -> bool:
        return bool(self._choices.all[number].finish_reason)

    def body(self) -> bytes:
        """Return the body: all choices have ended."""
        texts = [
            ("".join(parts), choice.finish_reason) for parts, choice in zip(self._texts, self._choices.all, strict=True)
        ]
        return whole_body(self._plan, self._identity, texts, self._choices.usage())


class ReadyBody:
    """The body of a response that is not a stream, of a model that makes it itself. A `Receiver`."""

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

    def end(self, number: int) -> None:
        """See `Receiver`: the model has made the body."""

    def is_stopped(self, number: int) -> bool:
        return False

    def is_finished(self, number: int) -> bool:
        return False

    def body(self) -> bytes:
        """Return the body. Raises `InternalError` if the model has sent none."""
        if not self._body:
            raise InternalError("the model has sent no response, expected one whole body")
        return self._body
