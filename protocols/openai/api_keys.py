"""The API keys of clients, from a file that is read again when it changes.

A line has the name of a key, the key, and the models that it may use; all models without any:

    # name   key               models
    ann      sk-1f6c02a9b7
    shop     sk-90d3e4c8aa     chat summaries

Keys are kept and looked up by their digest: how long that takes says nothing about a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import BadOption
from kernel.regular_files import read_regular
from protocols.file_watch import FileWatch
from protocols.openai.errors import ApiError

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

#: How often the file is looked at, in seconds.
LOOK_S = 5.0

#: The most bytes of the file.
MAX_BYTE_SIZE = 1 << 20

_SCHEME = "bearer "


class ApiKey(msgspec.Struct, frozen=True):
    """A key, without its text."""

    name: str
    digest: bytes
    #: Empty for all models.
    models: frozenset[str] = frozenset()

    def admits(self, model: str) -> bool:
        """Whether clients with the key may use `model`."""
        return not self.models or model in self.models


def parse_keys(text: str) -> dict[bytes, ApiKey]:
    """Return the keys of a file by their digests. Raises `ValueError`, whose text names the line and shows no key."""
    found: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2:
            raise ValueError(f"line {number} has one word, expected a name, a key, and perhaps models")
        name, key, *models = words
        if not (name.isascii() and name.isprintable() and key.isascii() and key.isprintable()):
            raise ValueError(f"line {number} has a name or a key that is not of printable ASCII")
        if name in names:
            raise ValueError(f"line {number} has the name '{name}' again")
        digest = _digest(key)
        if digest in found:
            raise ValueError(f"line {number} has the same key as '{found[digest].name}'")
        names.add(name)
        found[digest] = ApiKey(name, digest, frozenset(models))
    if not found:
        raise ValueError("it has no key, so that nobody could use the server")
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class ApiKeys:
    """The keys of one server."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises `BadOption` for what is wrong with it."""
        self._path = path
        try:
            self._content = read_regular(path, MAX_BYTE_SIZE + 1)
            self._keys = self._parsed(self._content)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadOption(f"--openai-api-keys: the file '{path}' cannot be used: {reason}") from None
        #: To be started and stopped with the server.
        self.watch = FileWatch(self.look, LOOK_S, f"the file '{path}' with API keys cannot be read")

    def find(self, authorization: str | None) -> ApiKey:
        """Return the key in the header `Authorization`. Raises `ApiError` for none, and for one that is unknown."""
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise ApiError(
                "You didn't provide an API key. Send it in the header Authorization: Bearer YOUR_KEY", 401,
                code="invalid_api_key",
            )  # fmt: skip
        digest = _digest(authorization[len(_SCHEME) :].strip())
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            raise ApiError("Incorrect API key provided", 401, code="invalid_api_key")
        return key

    def look(self) -> None:
        """Use the keys of the file if it has changed; keep those that are there if it is wrong. Blocks."""
        content = read_regular(self._path, MAX_BYTE_SIZE + 1)
        if content == self._content:
            return
        self._content = content
        try:
            self._keys = self._parsed(content)
        except ValueError as error:
            logger.error("the API keys stay as they are: the file '%s' is wrong: %s", self._path, error)
        else:
            logger.info("%d API keys are in use, of the changed file '%s'", len(self._keys), self._path)

    def _parsed(self, content: bytes) -> dict[bytes, ApiKey]:
        if len(content) > MAX_BYTE_SIZE:
            raise ValueError(f"it has more than {MAX_BYTE_SIZE} bytes")
        try:
            return parse_keys(content.decode())
        except UnicodeDecodeError:
            raise ValueError("it is not UTF-8") from None
