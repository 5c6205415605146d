"""What has come of a client's request so far: the text of each choice, its end, and the usage. Pure.

Used by streams and by responses that come as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocols.openai.responses.texts import ChoiceText

if TYPE_CHECKING:
    from protocols.openai.dialects.pieces import Piece
    from protocols.openai.requests.plans import GenerationPlan


class Usage(msgspec.Struct, omit_defaults=False):
    """OpenAI's count of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice:
    """One choice."""

    __slots__ = ("_max_tokens", "_text", "_unsent", "finish_reason", "output_tokens", "prompt_tokens")

    def __init__(self, plan: GenerationPlan, number: int) -> None:
        self._text = ChoiceText(plan.stop_words)
        self._max_tokens = plan.max_tokens
        #: What is sent before the first text: the prompt, for `echo`.
        self._unsent = plan.echoed[number // plan.n] if plan.echoed else ""
        #: Empty until the choice has ended.
        self.finish_reason = ""
        #: None as long as the model has not said it.
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop word has come: the model need not go on."""
        return self._text.stopped

    def add(self, piece: Piece) -> str:
        """Return the text that the client gets for `piece`. The choice may have ended with it."""
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.output_tokens is not None:
            self.output_tokens = (self.output_tokens or 0) + piece.output_tokens
        if self.finish_reason:
            return ""
        text = self._text.add(piece.text) if piece.text else ""
        if self._unsent:
            text, self._unsent = self._unsent + text, ""
        if self._text.stopped:
            self.finish_reason = "stop"
        elif piece.finish_reason:
            text += self.end(piece.finish_reason)
        return text

    def end(self, finish_reason: str = "") -> str:
        """Return the rest of the text: the model sends no more. Without its reason, the number of tokens says it."""
        if self.finish_reason:
            return ""
        text, self._unsent = self._unsent + self._text.end(), ""
        cut = self._max_tokens is not None and (self.output_tokens or 0) >= self._max_tokens > 0
        self.finish_reason = "stop" if self._text.stopped else finish_reason or ("length" if cut else "stop")
        return text


class Choices:
    """All choices of a client's request."""

    def __init__(self, plan: GenerationPlan) -> None:
        self._plan = plan
        self.all = [Choice(plan, number) for number in range(plan.choices)]

    def usage(self) -> Usage | None:
        """Return the usage; None if the model did not say it for each choice. A prompt counts once."""
        prompt = output = 0
        for number, choice in enumerate(self.all):
            if choice.prompt_tokens is None or choice.output_tokens is None:
                return None
            output += choice.output_tokens
            if number % self._plan.n == 0:
                prompt += choice.prompt_tokens
        return Usage(prompt, output, prompt + output)
