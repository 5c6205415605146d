"""Bodies that aiohttp receives: read within limits of bytes, chunks and time.

Bodies that aiohttp receives: small ones in ordinary memory, others in blocks of their model.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import StreamReader, web

from kernel.errors import ArenaFull, InvalidArgument, ServingError
from protocols.http import bodies
from protocols.http.bodies import BodyCollector, BodyTooSlow, TooManyChunks, read_body
from protocols.http.client_limits import ClientTimeouts
from protocols.request_limits import RECEIVE_BUFFER_BYTE_SIZE
from shm.arena import Arena, Block

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeProtocol:
    """What a `StreamReader` uses of its protocol."""

    connected = True
    _reading_paused = False

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self, resume_parser: bool = True) -> None:
        self._reading_paused = False


class FakeRequest:
    """What reading a body uses of a request."""

    def __init__(self, content_length: int | None = None, headers: dict[str, str] | None = None) -> None:
        self.content_length = content_length
        self.headers = headers or {}
        protocol = cast("Any", FakeProtocol())
        self.content = StreamReader(protocol, 1 << 16, loop=asyncio.get_running_loop())


CHUNKED = {"Transfer-Encoding": "chunked"}


def too_large(byte_size: int) -> ServingError:
    return InvalidArgument(f"{byte_size} bytes are too many")


def read(
    prepare: Callable[[FakeRequest], None],
    *,
    limit: int = 10,
    content_length: int | None = None,
    headers: dict[str, str] | None = None,
) -> bytes:
    """Return what is read of a request whose body `prepare` feeds."""

    async def main() -> bytes:
        http = FakeRequest(content_length, headers)
        prepare(http)
        return await read_body(cast("web.BaseRequest", http), limit, too_large)

    return asyncio.run(main())


def feed(*parts: bytes, end: bool = True) -> Callable[[FakeRequest], None]:
    def prepare(http: FakeRequest) -> None:
        for part in parts:
            http.content.feed_data(part)
        if end:
            http.content.feed_eof()

    return prepare


def feed_chunks(*chunks: bytes) -> Callable[[FakeRequest], None]:
    def prepare(http: FakeRequest) -> None:
        for chunk in chunks:
            http.content.begin_http_chunk_receiving()
            http.content.feed_data(chunk)
            http.content.end_http_chunk_receiving()
        http.content.feed_eof()

    return prepare


def test_a_body_that_came_with_its_head_is_returned() -> None:
    assert read(feed(b"0123456789"), content_length=10) == b"0123456789"
    assert read(feed(), content_length=0) == b""


def test_chunks_are_joined() -> None:
    assert read(feed_chunks(b"012", b"345", b"6"), headers=CHUNKED) == b"0123456"


def test_a_body_that_comes_later_is_awaited() -> None:
    def later(http: FakeRequest) -> None:
        def go_on() -> None:
            http.content.feed_data(b"56789")
            http.content.feed_eof()

        http.content.feed_data(b"01234")
        asyncio.get_running_loop().call_soon(go_on)

    assert read(later, content_length=10) == b"0123456789"


def test_an_announced_size_above_the_limit_is_refused_unread() -> None:
    with pytest.raises(InvalidArgument, match="^11 bytes are too many$"):
        read(feed(end=False), content_length=11)


@pytest.mark.parametrize(
    ("prepare", "headers"), [(feed(b"0123456789x"), {}), (feed_chunks(b"01234", b"56789", b"x"), CHUNKED)]
)
def test_a_body_without_an_announced_size_is_refused_above_the_limit(
    prepare: Callable[[FakeRequest], None], headers: dict[str, str]
) -> None:
    with pytest.raises(InvalidArgument, match="^11 bytes are too many$"):
        read(prepare, headers=headers)


def test_too_many_chunks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_CHUNKS", 3)
    assert read(feed_chunks(*[b"x"] * 3), headers=CHUNKED) == b"xxx"
    with pytest.raises(TooManyChunks, match="^Chunked request body exceeds maximum of 3 non-empty chunks"):
        read(feed_chunks(*[b"x"] * 4), headers=CHUNKED)


def test_a_body_that_stops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "TIMEOUTS", ClientTimeouts(body_s=0.001))
    with pytest.raises(BodyTooSlow):
        read(feed(b"01234", end=False), content_length=10)


def test_a_malformed_body_is_an_error_of_the_client() -> None:
    def broken(http: FakeRequest) -> None:
        http.content.set_exception(web.RequestPayloadError("no chunk"))

    with pytest.raises(InvalidArgument, match="^the request body is malformed: no chunk$"):
        read(broken, headers=CHUNKED)


class Lab:
    def __init__(self, announced: int | None, capacity: int = 1 << 24) -> None:
        self.arena = Arena("bodies", capacity)
        self.collector = BodyCollector(self.take, announced)

    def take(self, byte_size: int) -> Block:
        block = self.arena.take(byte_size)
        if block is None:
            raise ArenaFull(byte_size)
        return block

    def add(self, body: bytes, part: int) -> None:
        for start in range(0, len(body), part):
            self.collector.add(body[start : start + part])


def test_a_small_body_takes_no_block() -> None:
    lab = Lab(None)
    body = os.urandom(RECEIVE_BUFFER_BYTE_SIZE)
    lab.add(body, 1000)
    assert lab.collector.is_small
    assert lab.collector.body() == body
    (source,) = lab.collector.sources()
    assert (source.data, lab.arena.allocator.block_count) == (body, 0)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("part", [999, 70_000, 10_000_000])
def test_a_large_body_lies_in_blocks_in_its_order(announced: bool, part: int) -> None:
    body = os.urandom(3_000_000)
    lab = Lab(len(body) if announced else None)
    lab.add(body, part)
    assert not lab.collector.is_small
    sources = lab.collector.sources()
    assert b"".join(bytes(source.raw()) for source in sources) == body
    assert not announced or len(sources) == 1, "memory of the announced size"
    assert sum(source.byte_size for source in sources) == len(body)
    lab.collector.release()
    assert lab.arena.allocator.block_count == len(sources), "the leases are the caller's"
    for source in sources:
        source.release()
    assert lab.arena.allocator.block_count == 0


def test_blocks_of_unknown_bodies_grow() -> None:
    lab = Lab(None)
    lab.add(bytes(4_000_000), 4096)
    assert 3 <= lab.arena.allocator.block_count <= 6
    assert lab.arena.allocator.used_bytes <= 2 * 4_000_000 + (256 << 10)
    lab.collector.release()
    lab.collector.release()
    assert lab.arena.allocator.block_count == 0


def test_a_body_that_is_longer_than_announced_is_kept_as_well() -> None:
    lab = Lab(100_000)
    body = os.urandom(400_000)
    lab.add(body, 90_000)
    assert b"".join(bytes(source.raw()) for source in lab.collector.sources()) == body


def test_without_memory_the_body_is_refused() -> None:
    lab = Lab(1 << 20, capacity=1 << 18)
    with pytest.raises(ArenaFull):
        lab.add(bytes(1 << 20), 4096)
    lab.collector.release()
    assert lab.arena.allocator.block_count == 0
