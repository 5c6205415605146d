"""What has come of a client's request so far: the text of each choice, its end, and the usage. Pure.

Used by streams and by responses that come as a whole. From `Choices` down: a choice has a `ChoiceText`, whose pieces
become whole characters and are cut at stop words, in time linear in the text. Models send UTF-8 in pieces that may end
within a character, or with U+FFFD where a tokenizer has replaced an incomplete one. Such an end is held back until the
next piece, and so is the beginning of a stop word.
"""

from __future__ import annotations

import codecs
import functools
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocols.openai.pieces import Piece
    from protocols.openai.plans import GenerationPlan


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

    @property
    def is_plain(self) -> bool:
        """Whether a piece that is whole characters, and nothing but text, reaches the client as it is."""
        return not (self.finish_reason or self._unsent) and self._text.is_plain

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


class ChoiceText:
    """The text of one choice, from the pieces of a model to what a client gets."""

    __slots__ = ("_characters", "_stop", "_words")

    def __init__(self, stop_words: Sequence[str]) -> None:
        self._characters = WholeCharacters()
        #: They become `StopWords` with the first piece: a request may have a thousand choices with sixteen words each.
        self._words = stop_words
        self._stop: StopWords | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop word has come."""
        return self._stop is not None and self._stop.stopped

    @property
    def is_plain(self) -> bool:
        """As `Choice.is_plain`."""
        return not self._words and self._characters.is_whole

    def add(self, piece: bytes) -> str:
        """Return the text that the client gets now."""
        text = self._characters.add(piece)
        if not self._words:
            return text
        if self._stop is None:
            self._stop = StopWords(self._words)
        return self._stop.add(text)

    def end(self) -> str:
        """Return the rest of the text: no more pieces come."""
        text = self._characters.end()
        return text if self._stop is None else self._stop.add(text) + self._stop.end()


#: For how many pieces U+FFFD at the end is held back: characters have four bytes at most, so tokens as well.
_MOST_HELD = 4


class WholeCharacters:
    """Decodes pieces of UTF-8 whose ends may be within a character."""

    __slots__ = ("_decoder", "_held", "_held_pieces")

    def __init__(self) -> None:
        #: None until a piece has not been whole.
        self._decoder: codecs.IncrementalDecoder | None = None
        self._held = ""
        self._held_pieces = 0

    @property
    def is_whole(self) -> bool:
        """Whether all pieces so far were whole."""
        return self._decoder is None and not self._held

    def add(self, piece: bytes) -> str:
        """Return the text that is complete with `piece`."""
        if self._decoder is None:
            try:
                text = piece.decode()
            except UnicodeDecodeError:
                self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
                text = self._decoder.decode(piece)
        else:
            text = self._decoder.decode(piece)
        if not self._held and not text.endswith("\ufffd"):
            return text
        return self._without_replaced(text)

    def _without_replaced(self, text: str) -> str:
        """Return `text` behind what was held back, without U+FFFD at its end as long as it may become a character."""
        text = self._held + text
        whole = text.rstrip("\ufffd")
        self._held = text[len(whole) :]
        self._held_pieces = self._held_pieces + 1 if self._held else 0
        if self._held_pieces > _MOST_HELD:
            self._held, self._held_pieces = "", 0
            return text
        return whole

    def end(self) -> str:
        """Return what was held back: no more pieces come."""
        rest = "" if self._decoder is None else self._decoder.decode(b"", True)
        text, self._held = self._held + rest, ""
        return text


class StopWords:
    """Cuts a text before the first of some stop words, wherever the pieces of the text end.

    The first is the one that is complete first, as a model that is asked after each token stops; of two that end at the
    same place it is the longer one.

    Each word is searched by Knuth, Morris and Pratt's method: each character is looked at twice at most for each word.
    """

    __slots__ = ("_held", "_searches", "stopped")

    def __init__(self, words: Sequence[str]) -> None:
        self._searches = [_Search(word) for word in words]
        self._held = ""
        #: Whether a stop word has come. Then nothing of the text follows.
        self.stopped = False

    def add(self, piece: str) -> str:
        """Return the text that is certainly before any stop word."""
        if self.stopped:
            return ""
        text, begin = self._held + piece, len(self._held)
        cut = None
        for search in self._searches:
            if (end := search.find_end(text, begin)) and (cut is None or (end, end - search.length) < cut):
                cut = end, end - search.length
        if cut is not None:
            self._held, self.stopped = "", True
            return text[: cut[1]]
        kept = max((search.matched for search in self._searches), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> str:
        """Return what was held back: no more pieces come."""
        text, self._held = self._held, ""
        return text


#: Longer pieces, in characters, are not searched one character after the other. It is more than a word has.
_LONG_PIECE = 512


@functools.lru_cache(maxsize=64)
def _borders_of(word: str) -> tuple[int, ...]:
    """Return how long the longest border of each prefix of a word is: a prefix that is also its end.

    The choices of a request have the same words.
    """
    borders, border = [0] * (len(word) + 1), 0
    for place in range(1, len(word)):
        while border and word[place] != word[border]:
            border = borders[border]
        border += word[place] == word[border]
        borders[place + 1] = border
    return tuple(borders)


class _Search:
    """Searches one word in a text that comes in pieces."""

    __slots__ = ("_borders", "_word", "matched")

    def __init__(self, word: str) -> None:
        self._word = word
        self._borders = _borders_of(word)
        #: How many characters of the word are at the end of the text.
        self.matched = 0

    @property
    def length(self) -> int:
        return len(self._word)

    def find_end(self, text: str, begin: int) -> int:
        """Return where the word ends in `text`, 0 if it is not there. What is before `begin` was searched."""
        word, borders, matched = self._word, self._borders, self.matched
        if len(text) - begin > _LONG_PIECE:  # `str.find` is a hundred times as fast, but says nothing of the end
            if (found := text.find(word, max(0, begin - len(word) + 1))) >= 0:
                return found + len(word)
            begin, matched = max(0, len(text) - len(word) + 1), 0
        place, end = begin, len(text)
        while place < end:
            if not matched:
                place = text.find(word[0], place)
                if place < 0:
                    break
                matched, place = 1, place + 1
            else:
                while matched and text[place] != word[matched]:
                    matched = borders[matched]
                matched += text[place] == word[matched]
                place += 1
            if matched == len(word):
                self.matched = matched
                return place
        self.matched = matched
        return 0
