"""The regions of clients by their names, and how many each client has. Pure.

Either all clients share the names, as in Triton, or each has names of its own (`--shared-memory-owner=peer`): then no
client can use, remove, see or take the names of another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shm.region import Region

#: The owner of all names that clients share.
_EVERYBODY = ""

_NO_REGIONS: dict[str, Region] = {}


class RegionTables:
    """Regions, each with the client that has registered it: a text, see `protocols/access/peer_identity.py`."""

    def __init__(self, *, owned: bool) -> None:
        """With `owned`, each client has names of its own."""
        self._owned = owned
        #: The names that all clients share. Read-only for others.
        self.shared: dict[str, Region] = {}
        self._tables: dict[str, dict[str, Region]] = {_EVERYBODY: self.shared}
        #: Region number → the client that has registered it; and how many each client has.
        self._peers: dict[int, str] = {}
        self._counts: dict[str, int] = {}

    def __iter__(self) -> Iterator[Region]:
        """Return all regions. They may be removed meanwhile."""
        return iter([region for table in self._tables.values() for region in table.values()])

    def __len__(self) -> int:
        return len(self._peers)

    def names(self, peer: str) -> dict[str, Region]:
        """Return the regions that a client may use, by name. Read-only."""
        return self._tables.get(peer, _NO_REGIONS) if self._owned else self.shared

    def count(self, peer: str) -> int:
        """Return how many regions a client has registered."""
        return self._counts.get(peer, 0)

    def add(self, region: Region, peer: str) -> None:
        """Add a region that a client has registered. The client has no other of this name."""
        owner = peer if self._owned else _EVERYBODY
        self._tables.setdefault(owner, {})[region.name] = region
        self._peers[region.number] = peer
        self._counts[peer] = self.count(peer) + 1

    def remove(self, region: Region) -> None:
        """Remove a region; nothing happens if it was removed before."""
        peer = self._peers.pop(region.number, None)
        if peer is None:
            return
        owner = peer if self._owned else _EVERYBODY
        del self._tables[owner][region.name]
        if owner and not self._tables[owner]:
            del self._tables[owner]
        self._counts[peer] -= 1
        if not self._counts[peer]:
            del self._counts[peer]
