"""Objects are received in blocks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kernel.repository.clouds import process as module
from kernel.repository.clouds.messages import Download, Place
from kernel.repository.clouds.process import BlockSize, StoreError, download

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PLACE = Place("s3", "bucket/repo", {})


def content(byte_size: int) -> bytes:
    return bytes(number % 251 for number in range(byte_size))


def request(folder: Path, **byte_sizes: int) -> Download:
    (folder / "incoming").mkdir()
    return Download(PLACE, {name: str(folder / name) for name in byte_sizes}, byte_sizes, str(folder / "incoming"))


def reader(objects: dict[str, bytes], asked: list[int]) -> Callable[[str, int, int], bytes]:
    def read(name: str, begin: int, end: int) -> bytes:
        asked.append(end - begin)
        return objects[name][begin:end]

    return read


def test_files_of_any_size_arrive_whole_in_short_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BYTE_SIZE", 1000)
    monkeypatch.setattr(module, "MAX_BYTE_SIZE", 4000)
    sizes = {"empty": 0, "one": 1, "block": 1000, "more": 1001, "long": 100_003}
    objects = {name: content(byte_size) for name, byte_size in sizes.items()}
    asked: list[int] = []
    received: list[int] = []
    download(request(tmp_path, **sizes), reader(objects, asked), received.append)
    assert {name: (tmp_path / name).read_bytes() for name in sizes} == objects
    assert max(asked) <= 4000
    assert received == sorted(received)
    assert received[-1] == sum(sizes.values())
    assert list((tmp_path / "incoming").iterdir()) == []


def test_blocks_get_longer_while_they_are_fast_and_shorter_when_they_are_slow() -> None:
    size = BlockSize()
    first = size.byte_size
    size.arrived(first, 0.1)
    assert size.byte_size == 2 * first
    size.arrived(first, 100.0)  # an older one, or the end of a file
    size.arrived(2 * first, 1.0)
    assert size.byte_size == 2 * first
    size.arrived(2 * first, 10.0)
    assert size.byte_size == first
    for _ in range(20):
        size.arrived(size.byte_size, 0.0)
    assert size.byte_size == 4 << 20
    for _ in range(20):
        size.arrived(size.byte_size, 60.0)
    assert size.byte_size == 64 << 10


def test_the_first_failure_is_said_while_other_files_still_arrive(tmp_path: Path) -> None:
    released = threading.Event()

    def read(name: str, begin: int, end: int) -> bytes:
        if name == "b":
            raise PermissionError(name)
        released.wait(60)
        return b"x"

    try:
        with pytest.raises(PermissionError):
            download(request(tmp_path, a=1, b=1), read, lambda _: None)
        assert not (tmp_path / "a").exists()
    finally:
        released.set()


def test_an_object_with_another_size_than_in_the_listing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="'a' is not as long as in the listing: 6 bytes came from byte 0 on, 7 were"):
        download(request(tmp_path, a=7), reader({"a": content(6)}, []), lambda _: None)
    assert not (tmp_path / "a").exists()


def test_a_disk_that_is_full_is_said_and_not_put_down_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, rest: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(StoreError, match="^the copy cannot be written: No space left on device$"):
        download(request(tmp_path, a=7), reader({"a": content(7)}, []), lambda _: None)
