"""Sealed memory: no process can change its size, and another kind of file is recognised."""

from __future__ import annotations

import fcntl
import os

import pytest

from shm.memfd import SEALS, NotSealedMemory, check_sealed, read_only_fd, sealed_memfd
from tests.open_descriptors import open_descriptors


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
