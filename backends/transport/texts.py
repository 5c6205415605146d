"""Texts of models in messages: what UTF-8 cannot carry is escaped, and long texts are cut. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

#: The longest error text or log line in a message, in bytes of UTF-8.
MAX_TEXT_BYTES = 64 * 2**10


def encodable(value: Any) -> Any:
    """Return a copy of a message in which each text can be encoded.

    Lone surrogates, which file names can contain, become escapes such as `\\udc80`. For a message that the encoder has
    refused; the usual ones need no copy.
    """
    if isinstance(value, str):
        return _escaped(value).decode()
    if isinstance(value, (list, tuple)):
        return type(value)(encodable(each) for each in value)
    if isinstance(value, dict):
        return {encodable(key): encodable(each) for key, each in value.items()}
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: encodable(each) for name, each in msgspec.structs.asdict(value).items()})
    return value


def shortened(text: str) -> str:
    """Return a text of at most `MAX_TEXT_BYTES`. One that is cut ends with a note of how long it was."""
    if len(text) <= MAX_TEXT_BYTES // 6:  # no character takes more bytes, also not an escape
        return text
    data = _escaped(text[: MAX_TEXT_BYTES + 1])
    if len(data) <= MAX_TEXT_BYTES:
        return text
    note = f"… (cut: the whole text has {len(text)} characters)"
    return data[: MAX_TEXT_BYTES - len(note.encode())].decode(errors="ignore") + note


def _escaped(text: str) -> bytes:
    return text.encode(errors="backslashreplace")
