"""Signs the values of a cache outside of the server, so that only servers with the same key can write responses.

A signed value begins with a keyed digest (BLAKE2b) of its own key in the store and of what follows. So a value that was
copied to another key of the store is refused as well.
"""

from __future__ import annotations

import hashlib
import hmac

from kernel.cache.encoding import BadEntry
from kernel.errors import InvalidArgument
from kernel.files.regular_files import read_regular

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
