"""Which keys of clients are opened."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shm import posix

if TYPE_CHECKING:
    from collections.abc import Callable

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
    with pytest.raises(posix.BadKey):
        posix.open_object(key)


def test_an_object_is_opened_with_any_number_of_slashes_in_front() -> None:
    name = f"naiad_test_{uuid.uuid4().hex}"
    path = Path(posix.FOLDER, name)
    path.write_bytes(b"12345678")
    try:
        for key in (name, f"/{name}", f"//{name}"):
            fd = posix.open_object(key)
            assert posix.size_of(fd) == 8
            os.close(fd)
    finally:
        path.unlink()


def test_links_fifos_and_folders_are_not_opened() -> None:
    name = f"naiad_test_{uuid.uuid4().hex}"
    path = Path(posix.FOLDER, name)
    makers: tuple[Callable[[], None], ...] = (
        lambda: path.symlink_to("/etc/passwd"),
        lambda: os.mkfifo(path),
        path.mkdir,
    )
    for make in makers:
        make()
        try:
            with pytest.raises(posix.CannotOpen):
                posix.open_object(name)
        finally:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()


def test_the_reserved_prefix_is_seen_behind_slashes() -> None:
    assert posix.is_reserved("///triton_python_backend_shm_region_1")
    assert not posix.is_reserved("/mine")
