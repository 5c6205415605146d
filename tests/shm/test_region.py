"""Regions: a handle, a mapping where one is needed, and leases that keep both until the last is given back."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from shm.region import CudaIpcHandle, FileHandle, Region, RegionKind

if TYPE_CHECKING:
    import mmap


def memfd(byte_size: int = 64) -> FileHandle:
    fd = os.memfd_create("r")
    os.ftruncate(fd, byte_size)
    return FileHandle(fd)


def region_of_client() -> Region:
    return Region("r", RegionKind.SYSTEM, memfd(), 64)


def arena(content: bytes = bytes(64)) -> Region:
    handle = memfd(len(content))
    os.pwrite(handle.fd, content, 0)
    return Region("a", RegionKind.ARENA, handle, len(content))


# ---- leases and the end ---------------------------------------------------------------------


def test_a_region_without_leases_closes_when_it_is_dropped() -> None:
    region = region_of_client()
    fd = region.fd
    region.drop()
    region.drop()
    assert region.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_dropped_region_closes_with_its_last_lease() -> None:
    region = region_of_client()
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


def test_a_region_has_its_handle_while_those_who_use_it_hear_that_it_is_closed() -> None:
    region = region_of_client()
    handle_was_open: list[bool] = []
    region.on_closed(lambda closing: handle_was_open.append(not closing.closed))
    region.drop()
    assert handle_was_open == [True]


def test_a_dropped_region_cannot_be_leased() -> None:
    region = region_of_client()
    lease = region.lease()
    region.drop()
    with pytest.raises(AssertionError, match="region r was dropped"):
        region.lease()
    lease.release()


def test_the_end_of_the_last_use_is_heard_once() -> None:
    region = region_of_client()
    with pytest.raises(AssertionError, match="region r is not in use"):
        region.on_unused(lambda _: None)
    unused: list[Region] = []
    first, second = region.lease(), region.lease()
    region.on_unused(unused.append)
    first.release()
    assert unused == []
    second.release()
    assert unused == [region]
    region.lease().release()
    assert unused == [region]
    region.drop()


def test_a_region_may_be_dropped_when_its_last_use_ends() -> None:
    region = region_of_client()
    closed: list[Region] = []
    region.on_closed(closed.append)
    lease = region.lease()
    region.on_unused(Region.drop)
    lease.release()
    assert region.closed
    assert closed == [region]


def test_numbers_are_never_used_again() -> None:
    first, second = region_of_client(), region_of_client()
    assert first.number < second.number
    first.drop()
    second.drop()
    third = region_of_client()
    assert third.number > second.number
    third.drop()


# ---- bytes ----------------------------------------------------------------------------------


def test_the_bytes_of_an_arena_can_be_seen_without_mapping_it_before() -> None:
    region = arena(b"0123456789")
    view = region.view(2, 5)
    assert bytes(view) == b"23456"
    assert view.readonly
    view.release()
    region.drop()


def test_an_arena_that_was_mapped_for_writing_is_seen_through_that_mapping() -> None:
    region = arena()
    region.map(writable=True)
    region.view(8, 4)[:] = b"abcd"
    assert os.pread(region.fd, 4, 8) == b"abcd"
    with pytest.raises(AssertionError, match="region a is mapped already"):
        region.map(writable=True)
    region.drop()


def test_a_view_that_is_still_held_stays_readable_after_the_region_was_closed() -> None:
    region = arena(b"0123456789")
    view = region.view(0, 10)
    region.drop()
    assert region.closed
    assert bytes(view) == b"0123456789"


def test_a_region_of_a_client_is_never_mapped_here() -> None:
    region = region_of_client()
    for attempt in (lambda: region.map(writable=False), lambda: region.view(0, 1)):
        with pytest.raises(AssertionError, match="region r belongs to a client"):
            attempt()
    region.drop()


# ---- handles --------------------------------------------------------------------------------


def test_only_arenas_are_ours() -> None:
    kinds = {kind: Region("r", kind, FileHandle(-1), 64).of_client for kind in RegionKind}
    ours = {RegionKind.ARENA: False, RegionKind.DEVICE: False}
    assert kinds == {RegionKind.SYSTEM: True, RegionKind.CUDA: True, **ours}


def test_device_memory_has_a_device_and_no_descriptor() -> None:
    region = Region("c", RegionKind.CUDA, CudaIpcHandle(bytes(64), 3), 1024)
    assert (region.device_id, region.closed) == (3, False)
    with pytest.raises(AssertionError, match="region c has no descriptor"):
        region.fd  # noqa: B018 - the attribute raises
    region.drop()
    assert region.closed
    host = region_of_client()
    assert host.device_id == 0
    host.drop()


def test_a_descriptor_is_closed_once() -> None:
    handle = memfd()
    handle.close()
    assert handle.closed
    handle.close()


# ---- threads --------------------------------------------------------------------------------


def test_threads_may_look_at_an_arena_for_the_first_time_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    region = arena(b"0123456789")
    seen: list[bytes] = []

    def look() -> None:
        seen.append(bytes(region.view(2, 5)))

    second = threading.Thread(target=look)

    def view_of(mapping: mmap.mmap) -> memoryview:
        """Called when the first thread has mapped the arena: let the second one look now."""
        second.start()
        second.join(0.05)  # it ends, or waits for the first
        return memoryview(mapping)

    monkeypatch.setattr("shm.region.memoryview", view_of, raising=False)
    look()
    second.join()
    assert seen == [b"23456"] * 2
    region.drop()


def test_a_region_that_must_not_be_mapped_any_more_says_so_once() -> None:
    region = Region("r", RegionKind.SYSTEM, memfd(), 64)
    called: list[Region] = []
    region.on_copied(called.append)
    assert not region.copied
    region.copy_from_now_on()
    region.copy_from_now_on()
    assert region.copied
    assert called == [region]
    region.drop()


def test_those_who_use_memory_of_a_device_hear_once_that_its_process_is_gone() -> None:
    region = Region("d", RegionKind.DEVICE, CudaIpcHandle(bytes(64), 0), 1024)
    lease = region.lease()
    heard: list[str] = []
    region.on_lost(lambda lost: heard.append(f"lost {lost.name}"))
    region.on_closed(lambda closed: heard.append("closed"))
    region.lose()
    region.lose()
    assert (region.lost, region.closed, heard) == (True, False, ["lost d"])
    lease.release()
    assert (region.closed, heard) == (True, ["lost d", "closed"])
