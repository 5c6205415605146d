"""Makes texts of clients and models safe to show: cut, and without control characters. Pure.

Used for errors, names of models, labels of metrics, tables and lines of the log.
"""

from __future__ import annotations

import json
import re

#: What can end a line or control a terminal: C0, DEL, C1, and the line ends of Unicode.
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029]")


#: The most bytes of a text from a client that an error repeats.
MAX_TEXT_BYTE_SIZE = 1 << 10


def limited(text: str, max_byte_size: int) -> str:
    """Return `text`, shortened if it is too long.

    A text with more bytes of UTF-8 is cut in the middle, with a note of its length. The end is kept, because most
    errors first repeat what a client has sent, and then say what is wrong.
    """
    if len(text) * 4 <= max_byte_size:  # a character has at most four bytes
        return text
    octets = text.encode(errors="surrogatepass")
    if len(octets) <= max_byte_size:
        return text
    end_byte_size = max_byte_size // 4
    begin = octets[: max_byte_size - end_byte_size].decode(errors="ignore")
    end = octets[-end_byte_size:].decode(errors="ignore")
    return f"{begin}… ({len(octets)} bytes) …{end}"


def printable(text: str, *, keep: str = "") -> str:
    """Return `text` with every control character but those in `keep` as a JSON escape, such as `\\u001b`."""
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda match: match[0] if match[0] in keep else json.dumps(match[0])[1:-1], text)


def shown_text(text: str, max_byte_size: int, *, keep: str = "") -> str:
    """Return `text` for a page: cut, without control characters, and with `?` for what UTF-8 cannot carry.

    The control characters in `keep` stay.
    """
    return printable(limited(text, max_byte_size), keep=keep).encode(errors="replace").decode()


def escaped(path: str) -> str:
    """Return the path of a file for the log: bytes that are not UTF-8 as Python's literals have them."""
    return path.encode(errors="backslashreplace").decode()


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can carry `text`. It cannot carry names of files whose bytes are not UTF-8 themselves."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_control(text: str) -> bool:
    """Whether `text` contains a control character, such as a line end or ESC."""
    return _CONTROL.search(text) is not None


def install_command(extra: str) -> str:
    """Return the command, for error texts, that installs the packages of an extra of `pyproject.toml`.

    From a checkout: no index has the package yet.
    """
    return f"pip install '.[{extra}]' (in a checkout of Naiad)"
