"""What is wrong with a text that is not JSON, and where: in the words and with the offsets of RapidJSON, as in Triton.

Runs only after msgspec has refused a text. Accepts what Triton accepts beyond JSON: NaN and Infinity,
a byte order mark in front, and anything behind a NUL.
"""

from __future__ import annotations

import re

from kernel.errors import InternalError

_SPACE = re.compile(rb"[ \t\n\r]*")
_PLAIN_CHARACTERS = re.compile(rb'[^"\\\x00-\x1f]*')
_DIGITS = re.compile(rb"[0-9]*")
_HEX4 = re.compile(rb"[0-9A-Fa-f]{4}")

#: Plain array elements, each with the comma behind it, many in one match. Without this pattern Python would read
#: every number of a tensor that holds one NaN.
PLAIN_ELEMENTS = re.compile(
    rb"(?:[ \t\n\r]*+(?:-?(?:(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,40})?|NaN|Inf(?:inity)?)|true|false|null)"
    rb"[ \t\n\r]*+,){1,256}+"
)

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LITERALS = {0x74: b"true", 0x66: b"false", 0x6E: b"null"}
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"
_QUOTE, _BACKSLASH, _COLON, _COMMA, _MINUS, _DOT, _ZERO = b'"\\:,-.0'

#: How many values are read one by one, each in 2 to 4 us, and without serving others. Plain elements of arrays do not
#: count: many are read at once.
MAX_VALUES = 500

#: Stands for the end of the text, as the NUL behind a C string does.
_END = 0


class JsonSyntaxError(InternalError):
    """A request body is not JSON. `offset` counts bytes."""

    def __init__(self, problem: str, offset: int) -> None:
        super().__init__(f"failed to parse the request JSON buffer: {problem} at {offset}")
        self.offset = offset


def check_syntax(text: bytes) -> int:
    """Return where the document in `text` ends. Raises `JsonSyntaxError`. Nesting may be of any depth.

    What is behind the first `MAX_VALUES` values is not looked at: the end of `text` is returned then.
    """
    return _Scanner(text).document()


class _Scanner:
    """Reads a text once, with the open containers on a stack of its own: Python's own stack is not deep enough."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = len(BYTE_ORDER_MARK) if text.startswith(BYTE_ORDER_MARK) else 0
        self._open = bytearray()

    def document(self) -> int:
        self._skip_space()
        if self._peek() == _END:
            raise JsonSyntaxError("The document is empty.", self._at)
        self._value()
        values = 1
        while self._open:
            values += 1
            if values > MAX_VALUES:
                return len(self._text)
            self._next_member()
        end = self._at
        self._skip_space()
        if self._peek() != _END:
            raise JsonSyntaxError("The document root must not be followed by other values.", self._at)
        return end

    def _peek(self) -> int:
        return self._text[self._at] if self._at < len(self._text) else _END

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _skip_plain_elements(self) -> None:
        """Read elements of an array up to the first that is not plain, or is the last one."""
        while match := PLAIN_ELEMENTS.match(self._text, self._at):
            self._at = match.end()
        self._skip_space()

    def _value(self) -> None:
        """Read a scalar, or enter containers down to the first scalar or empty container."""
        while True:
            first = self._peek()
            if first == _OPEN_OBJECT:
                self._at += 1
                self._skip_space()
                if self._peek() == _CLOSE_OBJECT:
                    self._at += 1
                    return
                self._open.append(first)
                self._name()
            elif first == _OPEN_ARRAY:
                self._at += 1
                self._skip_space()
                if self._peek() == _CLOSE_ARRAY:
                    self._at += 1
                    return
                self._open.append(first)
            else:
                self._scalar(first)
                return

    def _next_member(self) -> None:
        """Read what follows a complete value: a comma and one more value, or the end of the container."""
        self._skip_space()
        follows = self._peek()
        in_object = self._open[-1] == _OPEN_OBJECT
        if follows == _COMMA:
            self._at += 1
            if in_object:
                self._skip_space()
                self._name()
            else:
                self._skip_plain_elements()
            self._value()
        elif follows == (_CLOSE_OBJECT if in_object else _CLOSE_ARRAY):
            self._at += 1
            self._open.pop()
        elif in_object:
            raise JsonSyntaxError("Missing a comma or '}' after an object member.", self._at)
        else:
            raise JsonSyntaxError("Missing a comma or ']' after an array element.", self._at)

    def _name(self) -> None:
        if self._peek() != _QUOTE:
            raise JsonSyntaxError("Missing a name for object member.", self._at)
        self._string()
        self._skip_space()
        if self._peek() != _COLON:
            raise JsonSyntaxError("Missing a colon after a name of object member.", self._at)
        self._at += 1
        self._skip_space()

    def _scalar(self, first: int) -> None:
        if first == _QUOTE:
            self._string()
        elif first in _LITERALS:
            self._at += 1
            self._consume_all(_LITERALS[first][1:])
        else:
            self._number()

    def _consume(self, character: int) -> bool:
        if self._peek() != character:
            return False
        self._at += 1
        return True

    def _consume_all(self, characters: bytes) -> None:
        for character in characters:
            if not self._consume(character):
                raise JsonSyntaxError("Invalid value.", self._at)

    # ---- strings -----------------------------------------------------------------------------

    def _string(self) -> None:
        self._at += 1
        while True:
            match = _PLAIN_CHARACTERS.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            stopped_by = self._peek()
            if stopped_by == _QUOTE:
                self._at += 1
                return
            if stopped_by == _BACKSLASH:
                self._escape()
            elif stopped_by == _END:
                raise JsonSyntaxError("Missing a closing quotation mark in string.", self._at)
            else:  # a control character
                raise JsonSyntaxError("Invalid escape character in string.", self._at)

    def _escape(self) -> None:
        start = self._at
        self._at += 1
        kind = self._peek()
        if kind in b'"\\/bfnrt':
            self._at += 1
            return
        if kind != ord("u"):
            raise JsonSyntaxError("Invalid escape character in string.", start)
        self._at += 1
        code = self._hex4(start)
        if not 0xD800 <= code <= 0xDFFF:
            return
        if (
            code <= 0xDBFF
            and self._consume(_BACKSLASH)
            and self._consume(ord("u"))
            and 0xDC00 <= self._hex4(start) <= 0xDFFF
        ):
            return
        raise JsonSyntaxError("The surrogate pair in string is invalid.", start)

    def _hex4(self, start: int) -> int:
        match = _HEX4.match(self._text, self._at)
        if match is None:
            raise JsonSyntaxError("Incorrect hex digit after \\u escape in string.", start)
        self._at = match.end()
        return int(match.group(), 16)

    # ---- numbers -----------------------------------------------------------------------------

    def _number(self) -> None:
        start = self._at
        self._consume(_MINUS)
        if self._consume(ord("N")):
            self._consume_all(b"aN")
            return
        if self._consume(ord("I")):
            self._consume_all(b"nf")
            if self._peek() == ord("i"):
                self._consume_all(b"inity")
            return
        if not self._consume(_ZERO) and not self._digits():
            raise JsonSyntaxError("Invalid value.", self._at)
        if self._consume(_DOT) and not self._digits():
            raise JsonSyntaxError("Miss fraction part in number.", self._at)
        if self._consume(ord("e")) or self._consume(ord("E")):
            if not self._consume(ord("+")):
                self._consume(_MINUS)
            if not self._digits():
                raise JsonSyntaxError("Miss exponent in number.", self._at)
        if float(self._text[start : self._at]) in (float("inf"), float("-inf")):
            raise JsonSyntaxError("Number too big to be stored in double.", start)

    def _digits(self) -> bool:
        match = _DIGITS.match(self._text, self._at)
        assert match is not None
        found = match.end() > self._at
        self._at = match.end()
        return found
