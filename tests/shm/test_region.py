"""Regions: a handle, a mapping where one is needed, and leases that keep both until the last is given back.

The size of sealed memory cannot change, and another kind of file is recognised. Only some keys of clients are opened.
"""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shm import region
from shm.region import (
    SEALS,
    CudaIpcHandle,
    FileHandle,
    NotSealedMemory,
    Region,
    RegionKind,
    check_sealed,
    read_only_fd,
    sealed_memfd,
)
from tests.open_descriptors import open_descriptors

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable


def file_handle(byte_size: int = 64) -> FileHandle:
    fd = os.memfd_create("r")
    os.ftruncate(fd, byte_size)
    return FileHandle(fd)


def region_of_client() -> Region:
    return Region("r", RegionKind.SYSTEM, file_handle(), 64)


def arena(content: bytes = bytes(64)) -> Region:
    handle = file_handle(len(content))
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
    handle = file_handle()
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
    region = Region("r", RegionKind.SYSTEM, file_handle(), 64)
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


def memfd(byte_size: int, seals: int | None) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | (0 if seals is None else os.MFD_ALLOW_SEALING))
    os.ftruncate(fd, byte_size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_sealed_memory_keeps_its_size_and_is_recognised_by_its_seals() -> None:
    fd = sealed_memfd("test", 8192)
    for byte_size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, byte_size)
    reader = read_only_fd(fd)
    for each in (fd, reader):
        check_sealed(each, 8192)
        check_sealed(each, 4096)
    os.close(reader)
    os.close(fd)


def test_a_size_that_cannot_be_had_leaves_no_descriptor() -> None:
    before = open_descriptors()
    with pytest.raises(OSError):
        sealed_memfd("test", -1)
    assert open_descriptors() <= before


@pytest.mark.parametrize(
    ("seals", "byte_size", "said"),
    [
        (None, 4096, "a memfd with seals 0x1, expected 0x7"),
        (0, 4096, "a memfd with seals 0x0, expected 0x7"),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, 4096, "a memfd with seals 0x6, expected 0x7"),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL, 4096, "a memfd with seals 0x3, expected 0x7"),
        (SEALS, 4097, "a memfd of 4096 bytes, announced as 4097"),
        (SEALS, 0, "a memfd of 4096 bytes, announced as 0"),
        (SEALS, -1, "a memfd of 4096 bytes, announced as -1"),
    ],
)
def test_memory_that_can_change_its_size_or_is_shorter_than_announced_is_refused(
    seals: int | None, byte_size: int, said: str
) -> None:
    fd = memfd(4096, seals)
    try:
        with pytest.raises(NotSealedMemory) as caught:
            check_sealed(fd, byte_size)
    finally:
        os.close(fd)
    assert str(caught.value) == said


def test_descriptors_of_other_things_are_refused() -> None:
    for made in (os.pipe()[::-1], (os.open("/dev/null", os.O_RDWR),)):
        for fd in made:
            with pytest.raises(NotSealedMemory, match="not a memfd"):
                check_sealed(fd, 4096)
            os.close(fd)


def test_memory_of_huge_pages_is_refused() -> None:
    try:
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError as error:
        pytest.skip(f"this system has no huge pages: {error}")
    try:
        os.ftruncate(fd, 2 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        with pytest.raises(NotSealedMemory, match="huge pages"):
            check_sealed(fd, 4096)
    finally:
        os.close(fd)


BAD_KEYS = [
    "",
    "/",
    "//",
    ".",
    "..",
    "/.",
    "/..",
    "a/b",
    "/../etc/passwd",
    "nul\0x",
    "new\nline",
    "x" * 256,
    "\x1b[0m",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_shm_open_would_refuse_or_misread_are_bad(key: str) -> None:
    with pytest.raises(region.BadKey):
        region.open_object(key)


def test_an_object_is_opened_with_any_number_of_slashes_in_front() -> None:
    name = f"naiad_test_{uuid.uuid4().hex}"
    path = Path(region.FOLDER, name)
    path.write_bytes(b"12345678")
    try:
        for key in (name, f"/{name}", f"//{name}"):
            fd = region.open_object(key)
            assert region.size_of(fd) == 8
            os.close(fd)
    finally:
        path.unlink()


def test_links_fifos_and_folders_are_not_opened() -> None:
    name = f"naiad_test_{uuid.uuid4().hex}"
    path = Path(region.FOLDER, name)
    makers: tuple[Callable[[], None], ...] = (
        lambda: path.symlink_to("/etc/passwd"),
        lambda: os.mkfifo(path),
        path.mkdir,
    )
    for make in makers:
        make()
        try:
            with pytest.raises(region.CannotOpen):
                region.open_object(name)
        finally:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()


def test_the_reserved_prefix_is_seen_behind_slashes() -> None:
    assert region.is_reserved_key("///triton_python_backend_shm_region_1")
    assert not region.is_reserved_key("/mine")
