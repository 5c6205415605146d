"""Makes texts of clients and models safe to show: cut, without control characters, without folders of the server. Pure.

Used for errors, names of models, labels of metrics, tables and lines of the log.

A text that a client gets never contains the path of a folder of the server, because it would reveal where models are,
who runs the server and how it is installed. The log keeps whole paths. `ServingError.text` and the repository index use
this. Texts can come from clients, so the time that this takes must be proportional to their length.
"""

from __future__ import annotations

import json
import posixpath
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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


#: What a path without spaces and quotes can be in a text.
_WORD = re.compile(r"[^\s'\":()]+")

#: The ends of folders that are not known before: those with the files of a load request, and Python's own, also in
#: environments of models.
_FOUND_BY_NAME = re.compile(r".*(/naiad-model-\w+|/lib(?:64)?/python3(?:\.\d+)?(?:/(?:site|dist)-packages)?)(?:/+|$)")

_NAMES = ("/naiad-model-", "/python3")


class ServerPaths:
    """The folders that clients do not see."""

    def __init__(self) -> None:
        self._folders: set[str] = set()
        self._pattern: re.Pattern[str] | None = None

    def add(self, folder: str) -> None:
        """Hide the absolute path `folder` from now on. Paths in it are shown as relative ones."""
        folder = posixpath.normpath(folder)
        if folder.startswith("/") and folder.strip("/"):
            self._add(folder)

    def _add(self, folder: str) -> None:
        if folder in self._folders:
            return
        self._folders.add(folder)
        known = sorted(map(re.escape, self._folders), key=len, reverse=True)  # a folder may be in another one
        # Not within a longer name: /models is neither in /data/models nor in /models2.
        self._pattern = re.compile(rf"(?<![\w.-])({'|'.join(known)})(?:/+|(?![\w.-]))")

    def add_repositories(self, paths: Iterable[object]) -> None:
        """Hide the paths of model repositories, and where these are links, the paths of their targets. Blocks.

        The addresses of repositories in clouds are hidden, too.
        """
        for path in paths:
            if "://" in (text := str(path)):
                self._add(text)
            else:
                self.add(posixpath.abspath(text))
                self.add(posixpath.realpath(text))

    def hidden_in(self, text: str) -> str:
        """Return `text` with relative paths for those in the folders, and the last name for a folder itself."""
        if "/" not in text:
            return text
        if self._pattern is not None:
            text = self._pattern.sub(lambda found: _rest(found[1], found[0]), text)
        if any(name in text for name in _NAMES):
            text = _WORD.sub(_without_found_by_name, text)
        return text


def _without_found_by_name(word: re.Match[str]) -> str:
    """Return a word of a text without the folder of a load request or of Python in it."""
    text = word[0]
    begin = text.find("/")
    if begin < 0 or (begin and (text[begin - 1].isalnum() or text[begin - 1] in "._-")):  # no absolute path
        return text
    found = _FOUND_BY_NAME.match(text, begin)
    return text if found is None else text[:begin] + _rest(found[1], found[0]) + text[found.end() :]


def _rest(folder: str, found: str) -> str:
    """Return what is left of a `folder` that was found, with or without a slash behind it."""
    return "" if found[-1] == "/" else posixpath.basename(folder)


#: Those of this process. The composition root adds the repositories.
SERVER_PATHS = ServerPaths()
