"""Keys of restrictions as the operator gives them: as text, in a file, or in an environment variable.

A key on the command line can be read by every user of the machine (`ps`), one in a file or a variable cannot.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The most bytes of a key: clients send it in a header, and servers limit those.
_MAX_BYTE_SIZE = 4096


class KeyReader:
    """Reads keys, each source once: two front doors may have the same, and a pipe can be read only once."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._keys: dict[str, bytes] = {}

    def read(self, text: str, flag: str) -> bytes:
        """Return the key that `text`, from the value of `flag`, stands for. Raises `BadOption`, which names the flag.

        `@FILE` is the content of a file without the line end behind it, `$NAME` an environment variable; `@@` and `$$`
        begin a text with one `@` or `$`. Any other text is the key itself.
        """
        found = self._keys.get(text)
        if found is None:
            found = self._keys[text] = self._read(text, flag)
        return found

    def _read(self, text: str, flag: str) -> bytes:
        if text.startswith(("@@", "$$")):
            key, source = text[1:].encode(), "the text"
        elif text.startswith("@"):
            key, source = _file_content(text[1:], flag), f"the file '{text[1:]}'"
        elif text.startswith("$"):
            key = os.fsencode(self._environment.get(text[1:], ""))
            source = f"the environment variable '{text[1:]}'"
        else:
            key, source = text.encode(errors="surrogateescape"), "the text"
        if not key:
            raise BadOption(f"--{flag}: {source} has no key: it is empty or not set")
        if len(key) > _MAX_BYTE_SIZE:
            raise BadOption(f"--{flag}: {source} has more than {_MAX_BYTE_SIZE} bytes, which is too long for a key")
        if any(octet < 0x20 or octet == 0x7F for octet in key) or key != key.strip(b" "):
            raise BadOption(
                f"--{flag}: the key in {source} has a line end, another control character, or a space at its beginning "
                "or end, which clients cannot send in a header"
            )
        return key


def _file_content(path: str, flag: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTE_SIZE + 3)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadOption(f"--{flag}: the file '{path}' with the key cannot be read: {reason}") from None
    return content.removesuffix(b"\n").removesuffix(b"\r")
