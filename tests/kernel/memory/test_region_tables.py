"""Names of regions, shared or of each client, and how many each client has."""

from __future__ import annotations

import pytest

from kernel.memory.region_tables import RegionTables
from shm.region import FileHandle, Region, RegionKind


def region(name: str) -> Region:
    return Region(name, RegionKind.SYSTEM, FileHandle(-1), 64)


def test_shared_names_are_those_of_all_clients() -> None:
    tables = RegionTables(owned=False)
    mine, theirs = region("mine"), region("theirs")
    tables.add(mine, "a")
    tables.add(theirs, "b")
    for peer in ("a", "b", "c"):
        assert tables.names(peer) == {"mine": mine, "theirs": theirs}
    assert set(tables) == {mine, theirs}


def test_owned_names_are_those_of_one_client() -> None:
    tables = RegionTables(owned=True)
    mine, theirs = region("same"), region("same")
    tables.add(mine, "a")
    tables.add(theirs, "b")
    assert (tables.names("a"), tables.names("b"), tables.names("c")) == ({"same": mine}, {"same": theirs}, {})
    tables.remove(mine)
    assert (tables.names("a"), tables.names("b")) == ({}, {"same": theirs})
    assert list(tables) == [theirs]
    assert list(tables._tables) == ["", "b"], "clients that have no regions any more leave nothing"


@pytest.mark.parametrize("owned", [True, False])
def test_regions_are_counted_for_each_client_and_once(owned: bool) -> None:
    tables = RegionTables(owned=owned)
    first, second = region("first"), region("second")
    tables.add(first, "a")
    tables.add(second, "a")
    assert (len(tables), tables.count("a"), tables.count("b")) == (2, 2, 0)
    tables.remove(first)
    tables.remove(first)
    assert (len(tables), tables.count("a")) == (1, 1)
    tables.remove(second)
    assert (len(tables), tables.count("a"), tables._counts) == (0, 0, {})
