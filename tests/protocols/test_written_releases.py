from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocols.written_releases import WrittenReleases, pause_in_writelines


class FullTransport(asyncio.Transport):
    """A transport that has `unwritten` bytes left to write."""

    def __init__(self, *, encrypted: bool = False) -> None:
        super().__init__({"sslcontext": object() if encrypted else None})
        self.unwritten = 100
        self.high: int | None = None

    def get_write_buffer_size(self) -> int:
        return self.unwritten

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high


def released(releases: WrittenReleases, log: list[Any], *names: str) -> None:
    releases.add([lambda name=name: log.append(name) for name in names])  # type: ignore[misc]  # no type for a default


def test_what_is_written_at_once_is_released_at_once() -> None:
    transport, log = FullTransport(), list[Any]()
    transport.unwritten = 0
    released(WrittenReleases(transport), log, "a", "b")
    assert log == ["a", "b"]


def test_what_the_transport_keeps_is_released_when_it_keeps_nothing() -> None:
    transport, log = FullTransport(), list[Any]()
    releases = WrittenReleases(transport)
    released(releases, log, "a")
    released(releases, log, "b")
    assert log == []
    releases.run()
    assert log == ["a", "b"]
    releases.run()
    assert log == ["a", "b"], "each is called once"


def test_what_was_kept_goes_with_what_is_written_later() -> None:
    transport, log = FullTransport(), list[Any]()
    releases = WrittenReleases(transport)
    released(releases, log, "a")
    transport.unwritten = 0
    released(releases, log, "b")
    assert log == ["a", "b"]


@pytest.mark.parametrize(("encrypted", "high"), [(False, 0), (True, 1)])
def test_writing_pauses_as_soon_as_a_byte_is_left(encrypted: bool, high: int) -> None:
    transport = FullTransport(encrypted=encrypted)
    WrittenReleases(transport)
    assert transport.high == high


class NeverPausing:
    """A transport whose `writelines` does not compare its limit with what is left, as that of Python 3.12.1."""

    def __init__(self) -> None:
        self.left = 0
        self.paused = False

    def writelines(self, parts: list[bytes]) -> None:
        self.left = max(0, sum(map(len, parts)) - 4)  # the socket takes four bytes

    def get_write_buffer_size(self) -> int:
        return self.left

    def set_write_buffer_limits(self, high: int) -> None:
        self.paused = self.left > high


def test_a_transport_that_never_pauses_is_made_to_pause_when_something_is_left() -> None:
    transport = NeverPausing()
    pause_in_writelines(transport)
    transport.writelines([b"ab", b"cd"])
    assert not transport.paused
    transport.writelines([b"abc", b"de"])
    assert transport.paused
