"""A response cache over a `CacheStore`, such as Redis: limits of time, number and memory, so that no request waits for
a store that is slow or down.

A lookup that fails or takes too long is a miss. After several failures in a row the store is not asked for some
seconds; requests meanwhile are misses at once.

With a key for signatures only servers that have it can write responses. A signed value begins with a keyed digest
(BLAKE2b) of its own key in the store and of what follows. So a value that was copied to another key of the store is
refused as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from typing import TYPE_CHECKING, TypeVar

from kernel.background import BackgroundTasks
from kernel.cache.encoding import FORMAT, BadEntry, can_be_stored, decode_in_pieces, encode
from kernel.errors import InvalidArgument
from kernel.observe.limited_log import LimitedLog
from kernel.regular_files import read_regular
from kernel.serving.interface import CacheFigures
from kernel.texts import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from typing import Any

    from kernel.cache.interface import CachedResponse, CacheStore, ExpectedOutputs
    from kernel.loop.clock import Clock
    from kernel.serving.response import ParameterValue
    from shm.tensor import Tensor

_DIGEST_BYTE_SIZE = 32

#: Shorter keys can be guessed; longer files are no keys.
_MIN_BYTE_SIZE, _MAX_BYTE_SIZE = 16, 4096


class Signing:
    """The key of a cache."""

    def __init__(self, secret: bytes) -> None:
        # BLAKE2b takes keys of up to 64 bytes.
        self._secret = hashlib.blake2b(secret, person=b"naiad cache key").digest()
        #: A part of the keys in the store: servers with different signing keys do not see the entries of one another.
        self.name = hashlib.blake2b(self._secret, digest_size=4, person=b"naiad cache name").hexdigest()

    def signed(self, key: bytes, value: bytes) -> bytes:
        """Return the value as it is stored under `key`."""
        return self._digest(key, memoryview(value)) + value

    def verified(self, key: bytes, stored: bytes) -> memoryview:
        """Return the value that was stored under `key`. Raises `BadEntry`."""
        value = memoryview(stored)[_DIGEST_BYTE_SIZE:]
        if not hmac.compare_digest(self._digest(key, value), stored[:_DIGEST_BYTE_SIZE]):
            raise BadEntry("a wrong signature")
        return value

    def _digest(self, key: bytes, value: memoryview) -> bytes:
        hasher = hashlib.blake2b(key, key=self._secret, digest_size=_DIGEST_BYTE_SIZE, person=b"naiad cache")
        hasher.update(value)
        return hasher.digest()


def read_signing_key(path: str) -> Signing:
    """Return the key in the file at `path`, without line feeds at its end. Raises `InvalidArgument`. Blocks."""
    try:
        secret = read_regular(path, _MAX_BYTE_SIZE + 1).rstrip(b"\r\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"the signing key of the cache cannot be read from '{path}': {reason}") from None
    if not _MIN_BYTE_SIZE <= len(secret) <= _MAX_BYTE_SIZE:
        raise InvalidArgument(
            f"the signing key of the cache in '{path}' must have {_MIN_BYTE_SIZE} to {_MAX_BYTE_SIZE} bytes; such as "
            f"made by: head -c 32 /dev/urandom | base64 > {path}"
        )
    return Signing(secret)


#: After this number of failures in a row the store is not asked for a while.
FAILURE_LIMIT = 5

FIRST_PAUSE_NS = 1_000_000_000

LONGEST_PAUSE_NS = 30_000_000_000


class CircuitBreaker:
    """Lets calls pass until several in a row have failed. Then it refuses all calls for a time, and lets one try.

    The time doubles with each try that fails, up to a limit. A call that succeeds lets all pass again.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._pause_ns = 0
        self._closed_until_ns = 0
        #: Whether the one call that tries is under way.
        self._trying = False

    @property
    def paused(self) -> bool:
        """Whether the store is regarded as down."""
        return self._pause_ns > 0

    def allows(self, now_ns: int) -> bool:
        """Whether a call may be made now. `succeeded` or `failed` follows for each call that is made."""
        if not self._pause_ns:
            return True
        if self._trying or now_ns < self._closed_until_ns:
            return False
        self._trying = True
        return True

    def succeeded(self) -> bool:
        """A call has succeeded. Returns whether the store was regarded as down until now."""
        was_paused = self._pause_ns > 0
        self._failures = self._pause_ns = 0
        self._trying = False
        return was_paused

    def failed(self, now_ns: int) -> bool:
        """A call has failed. Returns whether the store is regarded as down from now on, and was not before."""
        if self._pause_ns:
            if self._trying:
                self._trying = False
                self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
                self._closed_until_ns = now_ns + self._pause_ns
            return False
        self._failures += 1
        if self._failures < FAILURE_LIMIT:
            return False
        self._pause_ns = FIRST_PAUSE_NS
        self._closed_until_ns = now_ns + self._pause_ns
        return True


logger = logging.getLogger(__name__)

_bad_values = LimitedLog(logger, logging.WARNING)

_T = TypeVar("_T")

#: The most lookups at a time; a request beyond them is a miss.
MAX_LOOKUPS = 128

#: The most insertions at a time, and their bytes; a response beyond them is not stored.
MAX_INSERTIONS = 64

MAX_INSERTED_BYTE_SIZE = 32 << 20

#: The largest value, so that encoding and decoding take at most about 2 ms of the event loop.
DEFAULT_VALUE_LIMIT = 1 << 20


class StoredCache:
    """Implements `ResponseCache`."""

    shared = True

    def __init__(
        self,
        store: CacheStore,
        clock: Clock,
        *,
        title: str,
        timeout_s: float,
        value_limit: int = DEFAULT_VALUE_LIMIT,
        signing: Signing | None = None,
    ) -> None:
        """`title` names the store in the log. Each call of the store may take `timeout_s` seconds.

        Responses of more than `value_limit` bytes are not stored, and larger values in the store are ignored.
        With `signing` values are signed, and others are ignored.
        """
        self.figures = CacheFigures()
        self._store = store
        self._clock = clock
        self._title = title
        self._timeout_s = timeout_s
        self._value_limit = value_limit
        self._signing = signing
        self._prefix = f"naiad:{FORMAT}:" if signing is None else f"naiad:{FORMAT}:{signing.name}:"
        self._breaker = CircuitBreaker()
        self._lookups, self._insertions = BackgroundTasks(), BackgroundTasks()
        #: Bytes of values that are being stored.
        self._inserted_byte_size = 0
        self._closed = False

    # ---- kernel.cache.interface.ResponseCache ----------------------------------------------------

    def lookup(self, key: bytes, found: Callable[[CachedResponse | None], None], expected: ExpectedOutputs) -> None:
        self.figures.lookups += 1
        if self._closed or self._lookups.count >= MAX_LOOKUPS or not self._breaker.allows(self._clock.now_ns()):
            found(None)
            return
        self._lookups.start(self._find(key, found, expected))

    def insert(
        self,
        key: bytes,
        outputs: Sequence[Tensor],
        parameters: dict[str, ParameterValue] | None,
        expected: ExpectedOutputs,
    ) -> bool:
        """Store copies of `outputs`, made before this returns. That the key has an entry is not noticed."""
        byte_size = sum(each.byte_size for each in outputs)
        if (
            byte_size > self._value_limit
            or self._closed
            or self._insertions.count >= MAX_INSERTIONS
            or self._inserted_byte_size + byte_size > MAX_INSERTED_BYTE_SIZE
            or not can_be_stored(outputs, parameters, expected())
            or not self._breaker.allows(self._clock.now_ns())
        ):
            self.figures.not_stored += 1
            return True
        begun_ns = self._clock.now_ns()
        value = encode(outputs, parameters)
        if self._signing is not None:
            value = self._signing.signed(key, value)
        self.figures.insertion_ns += self._clock.now_ns() - begun_ns
        self._inserted_byte_size += len(value)
        self._insertions.start(self._put(key, value))
        return True

    async def close(self) -> None:
        """Close the store. Insertions that are not finished are given up."""
        self._closed = True
        await self._lookups.close()
        await self._insertions.close()
        await self._call(self._store.close())

    # ---- calls of the store ------------------------------------------------------------------------

    async def _find(
        self, key: bytes, found: Callable[[CachedResponse | None], None], expected: ExpectedOutputs
    ) -> None:
        begun_ns = self._clock.now_ns()
        response: CachedResponse | None = None
        try:
            value = await self._call(self._store.get(self._text(key)))
            if value is not None:
                response = await self._decoded(key, value, expected())
        finally:  # also if this task is cancelled: the request waits
            self.figures.lookup_ns += self._clock.now_ns() - begun_ns
            self.figures.hits += response is not None
            found(response)

    async def _decoded(self, key: bytes, value: object, expected: Mapping[str, str]) -> CachedResponse | None:
        """Return the response in a value, or None if the value is not a response of the model."""
        try:
            if not isinstance(value, bytes):
                raise BadEntry(f"a value of type {type(value).__name__}, expected bytes")
            if len(value) > 2 * self._value_limit:
                raise BadEntry(f"{len(value)} bytes, expected at most {2 * self._value_limit}")
            verified = value if self._signing is None else self._signing.verified(key, value)
            pieces = decode_in_pieces(verified, expected)
            while True:
                next(pieces)
                await asyncio.sleep(0)
        except StopIteration as end:
            response: CachedResponse = end.value
            return response
        except BadEntry as error:
            self.figures.failures += 1
            _bad_values.log(
                self._title, "%s returned a value that is not a response of this server: %s", self._title, error
            )
            return None

    async def _put(self, key: bytes, value: bytes) -> None:
        begun_ns = self._clock.now_ns()
        try:
            await self._call(self._store.put(self._text(key), value))
        finally:
            self._inserted_byte_size -= len(value)
            self.figures.insertion_ns += self._clock.now_ns() - begun_ns

    async def _call(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Return the result of a call of the store, or None if it fails or takes too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await work
        except Exception as error:  # the store may be anybody's
            self._failed(error)
            return None
        if self._breaker.succeeded():
            logger.info("%s responds again", self._title)
        return result

    def _failed(self, error: Exception) -> None:
        self.figures.failures += 1
        cause = (
            f"no response within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else printable(str(error))
        )
        if self._breaker.failed(self._clock.now_ns()):
            logger.error(
                "%s failed several times in a row; for some seconds it is not asked, and every lookup is a miss: %s",
                self._title, cause,
            )  # fmt: skip
        else:
            logger.debug("%s failed: %s", self._title, cause)

    def _text(self, key: bytes) -> str:
        """Return the key as it is in the store."""
        return f"{self._prefix}{key.hex()}"
