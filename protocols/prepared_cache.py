"""A bounded cache of what was prepared while the model catalog was the same. Pure.

Both protocols compare a request with earlier ones, so that a repeated kind of request is not parsed and checked
again. What was prepared is valid for one generation of the catalog (`Catalog.generation`).
"""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Prepared = TypeVar("Prepared")


class PreparedCache(Generic[Key, Prepared]):
    """Prepared values by key, for one generation. A full cache is emptied: clients repeat few kinds of requests.

    Read it in two steps. If `generation` is not that of the catalog, call `start_generation` and take this as a miss;
    else call `entries.get(key)`. A method that did both would cost every request a Python call.
    """

    __slots__ = ("_max_entries", "entries", "generation")

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        #: Read-only outside of this class; use `add`.
        self.entries: dict[Key, Prepared] = {}
        #: The generation of the catalog that `entries` are valid for.
        self.generation = -1

    def start_generation(self, generation: int) -> None:
        """Drop what was prepared for another generation."""
        self.entries.clear()
        self.generation = generation

    def add(self, key: Key, prepared: Prepared) -> None:
        """Keep `prepared`, which is valid for the current `generation`."""
        if len(self.entries) >= self._max_entries and key not in self.entries:
            self.entries.clear()
        self.entries[key] = prepared
