"""A lease is one holder's use of memory: it ends once, and what others hold stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shm.lease import Lease, LeasedBlock, RegionNumber
from shm.region import Region, RegionKind
from tests.shm.regions import memfd_region

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def region() -> Iterator[Region]:
    with memfd_region(RegionKind.ARENA, 8192) as made:
        yield made


@pytest.fixture
def freed() -> list[int]:
    return []


@pytest.fixture
def block(region: Region, freed: list[int]) -> LeasedBlock:
    return LeasedBlock(region, 4096, freed.append)


def test_each_use_of_a_region_is_counted_and_ends_once(region: Region) -> None:
    first, second = region.lease(), region.lease()
    assert region.lease_count == 2
    first.release()
    first.release()
    assert region.lease_count == 1
    second.release()
    assert region.lease_count == 0


def test_a_lease_of_a_region_can_be_shared_also_when_the_region_was_dropped(region: Region) -> None:
    lease = region.lease()
    region.drop()
    other = lease.share()
    lease.release()
    assert not region.closed, "the other holder uses it"
    assert other.region is region
    other.release()
    assert region.closed


def test_a_lease_that_was_released_cannot_be_shared(region: Region, block: LeasedBlock) -> None:
    leases: list[Lease] = [region.lease(), block.lease()]
    for lease in leases:
        lease.release()
        with pytest.raises(AssertionError, match="was released"):
            lease.share()


def test_a_block_is_free_when_the_last_of_its_leases_is_released(block: LeasedBlock, freed: list[int]) -> None:
    first = block.lease()
    second, third = first.share(), block.lease()
    assert block.lease_count == 3
    for lease in (first, third, third, first):
        lease.release()
    assert (block.lease_count, freed) == (1, [])
    second.release()
    assert (block.lease_count, freed) == (0, [4096])
    second.release()
    assert freed == [4096]


def test_a_block_keeps_its_region(region: Region, block: LeasedBlock) -> None:
    lease = block.lease()
    assert lease.region is region
    region.drop()
    assert not region.closed
    lease.release()
    assert region.closed


def test_a_block_is_free_before_its_region_is_closed(region: Region) -> None:
    closed_when_freed: list[bool] = []
    lease = LeasedBlock(region, 0, lambda _: closed_when_freed.append(region.closed)).lease()
    region.drop()
    lease.release()
    assert closed_when_freed == [False]


def test_all_leases_of_a_region_have_its_number(region: Region, block: LeasedBlock) -> None:
    leases: list[Lease] = [region.lease(), block.lease()]
    assert [lease.region_number for lease in leases] == [region.number] * 2
    for lease in leases:
        lease.release()


def test_a_number_stands_for_a_lease_that_somewhere_else_is_held() -> None:
    number = RegionNumber(7)
    assert number.region_number == 7
    number.release()
    number.release()
    with pytest.raises(AttributeError, match="has no attribute .region.$"):
        number.region  # noqa: B018 - the attribute raises
    with pytest.raises(NotImplementedError, match="RegionNumber cannot be shared"):
        number.share()
