"""What the response cache of a server has done: plain numbers, rendered only for the metrics page. Pure."""

from __future__ import annotations

import msgspec


class CacheFigures(msgspec.Struct):
    """What a cache has done since the server started. Durations are in nanoseconds."""

    lookups: int = 0
    hits: int = 0
    #: Entries that were removed to make room for newer ones.
    evictions: int = 0
    lookup_ns: int = 0
    insertion_ns: int = 0
    #: Lookups and insertions that failed, or took too long. A failed lookup counts as a miss, too.
    failures: int = 0
    #: Responses that were not stored: too large, or no memory was left.
    not_stored: int = 0
    #: How many responses the cache has, and their bytes; both only for a cache in the memory of the server.
    entries: int = 0
    used_byte_size: int = 0
    #: The most bytes that it may have; 0 for a cache elsewhere.
    byte_size: int = 0

    @property
    def misses(self) -> int:
        return self.lookups - self.hits
