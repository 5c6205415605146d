"""Finds where a value in brackets ends, in a text that comes in pieces: of JSON, or of Python. Pure."""

from __future__ import annotations

import re

import msgspec


class _Forms(msgspec.Struct, frozen=True):
    """The patterns that find brackets and quoted texts in a value."""

    #: Everything up to the next bracket, or to a quote whose text has no end yet.
    skipped: re.Pattern[str]
    #: Quote → the text up to its end, or up to a backslash at the end of the piece.
    within: dict[str, re.Pattern[str]]


def _forms(quotes: str, brackets: str) -> _Forms:
    """Return the patterns. They take linear time: each text matches in one way, and nothing follows that may fail."""
    text = r"[^{0}\\]*(?:\\.[^{0}\\]*)*"
    texts = "|".join(quote + text.format(quote) + quote for quote in quotes)
    outside = re.escape(quotes + brackets)
    return _Forms(
        re.compile(f"(?:[^{outside}]+|{texts})*", re.DOTALL),
        {quote: re.compile(text.format(quote), re.DOTALL) for quote in quotes},
    )


JSON, PYTHON = _forms('"', "[]{}"), _forms("\"'", "[]{}()")


class ValueEnd:
    """Finds the end of a JSON value in brackets, or of a Python one, in a text that comes in pieces."""

    def __init__(self, forms: _Forms = JSON) -> None:
        self._forms = forms
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def find_end(self, text: str) -> int:
        """Return where the value ends in the next piece of text, -1 if it does not end there."""
        place, end = 0, len(text)
        if self._escaped and text:
            self._escaped, place = False, 1
        skipped, within = self._forms.skipped, self._forms.within
        while place < end:
            pattern = within[self._quote] if self._quote else skipped
            found = pattern.match(text, place)
            assert found is not None, "the pattern matches also nothing"
            place = found.end()
            if place == end:
                return -1
            character = text[place]
            place += 1
            if self._quote:
                if character == "\\":  # nothing is behind it yet
                    self._escaped = True
                else:
                    self._quote = ""
            elif character in within:
                self._quote = character
            else:
                self._depth += 1 if character in "[{(" else -1
                if self._depth <= 0:
                    return place
        return -1
