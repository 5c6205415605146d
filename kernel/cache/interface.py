"""What a response cache is: the interface of caches to the kernel, and the one that authors of caches implement.

`ResponseCache` is what the kernel uses. `kernel.cache.local` implements it in memory. A `CacheStore` keeps bytes
somewhere else, such as in Redis; `kernel.cache.stored` makes a `ResponseCache` of it, with limits of time and memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kernel.serving.interface import CacheFigures
    from kernel.serving.response import ParameterValue
    from shm.tensor import Tensor


#: Returns the datatypes, by name, of the outputs that a response can have. It is called only where they are checked.
ExpectedOutputs: TypeAlias = "Callable[[], Mapping[str, str]]"


class CachedResponse(msgspec.Struct, eq=False):
    """A response from the cache. Its receiver owns it, and releases the leases of its outputs."""

    #: Inline, or with a span and a lease.
    outputs: list[Tensor]
    parameters: dict[str, ParameterValue] | None = None
    #: Whether an output has a lease.
    leased: bool = False

    def release(self) -> None:
        """Release the leases of the outputs."""
        for output in self.outputs:
            output.release()


class ResponseCache(Protocol):
    """Keeps responses by key. All methods are called in the kernel's loop and return at once."""

    #: Whether other servers see the entries, or this one after a restart. Then keys must not depend on this process.
    shared: bool
    figures: CacheFigures

    def lookup(self, key: bytes, found: Callable[[CachedResponse | None], None], expected: ExpectedOutputs) -> None:
        """Look `key` up, and call `found` once, before this returns or later. None means that there is no entry.

        A failure counts as no entry; where others can write to the cache, so does an entry that is not as `expected`.
        `found` owns the response.
        """

    def insert(
        self,
        key: bytes,
        outputs: Sequence[Tensor],
        parameters: dict[str, ParameterValue] | None,
        expected: ExpectedOutputs,
    ) -> bool:
        """Store copies of `outputs`, as soon as possible; returns False if the key has an entry already.

        The outputs are inline or in arenas, never in regions of clients. The caller keeps their leases; a cache that
        copies later takes leases of its own. A failure is only counted.
        """

    async def close(self) -> None:
        """Free all entries. Lookups that are still running find nothing."""


class CacheStore(Protocol):
    """Keeps bytes by key, outside of the server. Methods may raise any exception: then the lookup is a miss.

    The server limits how long each call takes and how many run at the same time, and stops calling a store for some
    seconds after several failures in a row.
    """

    async def get(self, key: str) -> bytes | None:
        """Return the value of `key`, or None if there is none."""

    async def put(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, in place of a value that is there."""

    async def close(self) -> None:
        """Close connections. Called once, when the server stops."""
