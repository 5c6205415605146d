"""Leases keep a dropped region alive until the last one is given back."""

from __future__ import annotations

import os

import pytest

from shm.region import FileHandle, Region, RegionKind


def new_region() -> Region:
    return Region("r", RegionKind.SYSTEM, FileHandle(os.memfd_create("r")), 64)


def test_a_region_without_leases_closes_when_it_is_dropped() -> None:
    region = new_region()
    region.drop()
    assert region.closed


def test_a_dropped_region_closes_with_its_last_lease() -> None:
    region = new_region()
    closed: list[Region] = []
    region.on_closed(closed.append)
    first, second = region.lease(), region.lease()
    region.drop()
    first.release()
    first.release()
    assert not region.closed
    assert closed == []
    second.release()
    assert region.closed
    assert closed == [region]


def test_a_dropped_region_cannot_be_leased() -> None:
    region = new_region()
    lease = region.lease()
    region.drop()
    with pytest.raises(AssertionError):
        region.lease()
    lease.release()


def test_numbers_are_never_used_again() -> None:
    first, second = new_region(), new_region()
    assert first.number < second.number
    first.drop()
    second.drop()
    third = new_region()
    assert third.number > second.number
    third.drop()
