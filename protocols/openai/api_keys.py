"""The API keys of clients, from a file that is read again when it changes.

A line has the name of a key, the key, the models that it may use (all models without any), and its limits:

    # name   key               models and limits
    ann      sk-1f6c02a9b7
    shop     sk-90d3e4c8aa     chat summaries requests_per_minute=60 tokens_per_minute=20000

Keys are kept and looked up by their digest: how long that takes says nothing about a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
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
    #: 0 for no limit.
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)

    def admits(self, model: str) -> bool:
        """Whether clients with the key may use `model`."""
        return not self.models or model in self.models


_NS_PER_MINUTE = 60_000_000_000

#: So little is no part of a request or token: it comes from adding fractions.
_ROUNDING = 1e-6


class KeyUse:
    """What the clients with one key have used of its limits: two buckets, which fill again within a minute. Pure.

    A request takes its place when it begins. Its tokens are taken when they have come, so that a bucket may be short of
    them for a time; meanwhile no request begins.
    """

    __slots__ = ("_filled_ns", "requests", "tokens")

    def __init__(self) -> None:
        #: How many of each are used; less than nothing is left while they are more than the limit.
        self.requests = self.tokens = 0.0
        self._filled_ns = 0

    def begin(self, key: ApiKey, now_ns: int) -> None:
        """Count a request of `key`. Raises `ApiError` (429) if it has to wait."""
        minutes = (now_ns - self._filled_ns) / _NS_PER_MINUTE
        self._filled_ns = now_ns
        self.requests = max(self.requests - minutes * key.requests_per_minute, 0.0)
        self.tokens = max(self.tokens - minutes * key.tokens_per_minute, 0.0)
        for kind, limit, excess in (
            ("requests", key.requests_per_minute, self.requests + 1 - key.requests_per_minute),
            # The next request has at least one token.
            ("tokens", key.tokens_per_minute, self.tokens + 1 - key.tokens_per_minute),
        ):
            if limit and excess > _ROUNDING:
                raise _limit_reached(key, kind, limit, excess)
        self.requests += bool(key.requests_per_minute)

    def spend(self, tokens: int) -> None:
        """Count tokens of a request: of its prompt, or generated."""
        self.tokens += tokens


def _limit_reached(key: ApiKey, kind: str, limit: int, excess: float) -> ApiError:
    wait_s = max(math.ceil(round(excess * 60 / limit, 6)), 1)
    error = ApiError(
        f"The API key '{key.name}' has used its {limit} {kind} a minute. Try again in {wait_s} s", 429,
        code="rate_limit_exceeded",
    )  # fmt: skip
    error.retry_after_s = wait_s
    return error


#: The most that a limit may be.
_MOST = 1_000_000_000

_LIMITS = ("requests_per_minute", "tokens_per_minute")


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
        limits = _take_limits(models, number)
        if not (name.isascii() and name.isprintable() and key.isascii() and key.isprintable()):
            raise ValueError(f"line {number} has a name or a key that is not of printable ASCII")
        if name in names:
            raise ValueError(f"line {number} has the name '{name}' again")
        digest = _digest(key)
        if digest in found:
            raise ValueError(f"line {number} has the same key as '{found[digest].name}'")
        names.add(name)
        found[digest] = ApiKey(name, digest, frozenset(models), **limits)
    if not found:
        raise ValueError("it has no key, so that nobody could use the server")
    return found


def _take_limits(words: list[str], line: int) -> dict[str, int]:
    """Remove the limits from the words behind a key, and return them. Raises `ValueError`."""
    found: dict[str, int] = {}
    for word in [word for word in words if word.startswith(tuple(f"{name}=" for name in _LIMITS))]:
        words.remove(word)
        name, _, value = word.partition("=")
        if name in found:
            raise ValueError(f"line {line} has {name} twice")
        if not (value.isascii() and value.isdigit() and 0 < int(value[:12]) <= _MOST):
            raise ValueError(f"line {line} has '{word}', expected {name}=NUMBER, at least 1 and at most {_MOST}")
        found[name] = int(value)
    if any("=" in word for word in words):  # it is not shown: it may be a key
        raise ValueError(f"line {line} has a word with '=' that is no limit, expected {' or '.join(_LIMITS)}=NUMBER")
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class ApiKeys:
    """The keys of one server."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises `BadOption` for what is wrong with it."""
        self._path = path
        self._uses: dict[str, KeyUse] = {}
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

    def use_of(self, key: ApiKey) -> KeyUse:
        """Return what clients with `key` have used. It stays when the file is read again."""
        use = self._uses.get(key.name)
        if use is None:
            names = {each.name for each in self._keys.values()}
            self._uses = {name: each for name, each in self._uses.items() if name in names}
            use = self._uses[key.name] = KeyUse()
        return use

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
