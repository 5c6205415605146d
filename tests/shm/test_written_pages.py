"""What the system says about pages of a private mapping: which of them this process has written to."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shm import written_pages
from shm.written_pages import unwritten

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = mmap.PAGESIZE


@pytest.fixture
def mapping() -> Iterator[mmap.mmap]:
    """Eight pages of a memfd, mapped privately."""
    fd = os.memfd_create("test")
    os.pwrite(fd, b"x" * 8 * PAGE, 0)
    made = mmap.mmap(fd, 8 * PAGE, flags=mmap.MAP_PRIVATE)
    os.close(fd)
    yield made
    made.close()


def address_of(mapping: mmap.mmap) -> int:
    address: int = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    return address


def test_pages_that_were_never_touched_or_only_read_are_unwritten(mapping: mmap.mmap) -> None:
    assert unwritten(address_of(mapping), 8 * PAGE)
    assert mapping[5 * PAGE] == ord("x")
    assert unwritten(address_of(mapping), 8 * PAGE)


def test_one_written_byte_counts_for_all_bytes_of_its_page(mapping: mmap.mmap) -> None:
    mapping[2 * PAGE] = 0
    address = address_of(mapping)
    assert unwritten(address, 2 * PAGE)
    assert not unwritten(address, 2 * PAGE + 1)
    assert not unwritten(address + 3 * PAGE - 1, 1)
    assert unwritten(address + 3 * PAGE, 5 * PAGE)


def test_pages_that_were_dropped_are_unwritten(mapping: mmap.mmap) -> None:
    mapping[0] = 0
    mapping.madvise(mmap.MADV_DONTNEED)
    assert unwritten(address_of(mapping), 8 * PAGE)


def test_all_pages_count_where_they_are_read_in_parts(mapping: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_pages, "MOST_PAGES", 3)
    assert unwritten(address_of(mapping), 8 * PAGE)
    mapping[8 * PAGE - 1] = 0
    assert not unwritten(address_of(mapping), 8 * PAGE)


def test_pages_count_as_written_where_the_system_does_not_say(
    mapping: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pread", lambda fd, byte_size, offset: b"")
    assert not unwritten(address_of(mapping), PAGE)
    monkeypatch.setattr(os, "open", refuse)
    assert not unwritten(address_of(mapping), PAGE)


def refuse(*arguments: object) -> int:
    raise PermissionError
