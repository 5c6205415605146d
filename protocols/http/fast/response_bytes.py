"""Responses of the fast path: as bytes, as aiohttp would write them, and their way to the transport.

A socket takes as much as its client reads meanwhile: a write of 100 MiB to a client on the same machine does not return
for 60 ms. So `ResponseWriter` gives a large response to the transport in pieces, one in each event-loop iteration, when
the piece before it was written.
"""

from __future__ import annotations

import asyncio
import email.utils
import functools
import time
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from protocols.http.responses import SERVER_HEADER
from protocols.request_limits import COPIED_RESPONSE_BYTE_SIZE
from protocols.written_releases import WrittenReleases

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from protocols.http.responses import HttpResponse
    from protocols.loop_budgets import IterationBudget
    from shm.tensor import Buffer


class ResponseBytes(msgspec.Struct):
    """A whole HTTP response: its head, and what follows it."""

    head: bytes
    parts: list[Buffer] = []
    #: Called when the transport has written the parts: they are memory of a worker.
    release: Callable[[], None] | None = None
    #: As it stands in the head.
    status: int = 200

    @property
    def byte_size(self) -> int:
        return len(self.head) + sum(map(len, self.parts))

    def last(self) -> ResponseBytes:
        """Return the same response with a head that says that the connection is closed after it."""
        head = self.head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        return ResponseBytes(head, self.parts, self.release, self.status)


def response_head(response: HttpResponse, byte_size: int, more: bytes) -> bytes:
    """Return the head of `response`, whose body has `byte_size` bytes.

    `more` are further headers, with their line ends, behind the content type.
    """
    before, content_type = _constant_parts(response.status, response.content_type)
    own = header_lines(response.headers) if response.headers else b""
    return b"%b%b%b%bContent-Length: %d%b" % (before, own, content_type, more, byte_size, _date(int(time.time())))


def response_bytes(response: HttpResponse, more: bytes) -> ResponseBytes:
    """Return `response` in one piece; `more` as for `response_head`. Its source is still the caller's."""
    head = response_head(response, sum(map(len, response.body)), more)
    return ResponseBytes(b"".join((head, *response.body)), [], None, response.status)


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Return headers as they stand in a head, each with its line end."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


_SERVER = header_lines(SERVER_HEADER)


@functools.cache
def _constant_parts(status: int, content_type: str) -> tuple[bytes, bytes]:
    line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    return line + _SERVER, header_lines({"Content-Type": content_type})


@functools.lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return f"\r\nDate: {email.utils.formatdate(second, usegmt=True)}\r\n\r\n".encode()


class ResponseWriter:
    """Gives responses to a transport, whose protocol calls `resume` in `resume_writing`."""

    def __init__(self, transport: asyncio.Transport, budget: IterationBudget, written: Callable[[], None]) -> None:
        """`written` is called when responses that `write` did not write at once were given to the transport."""
        self._transport = transport
        self._budget = budget
        self._written = written
        self._releases = WrittenReleases(transport)
        #: What the transport was not given yet, in order: bytes, and what to call when those before it are written.
        self._waiting: deque[memoryview | Callable[[], None]] = deque()
        self._waiting_byte_size = 0
        self._scheduled = False

    @property
    def busy(self) -> bool:
        """Whether the transport was not given all of the responses."""
        return bool(self._waiting)

    @property
    def unsent_byte_size(self) -> int:
        """How many bytes the socket has not taken."""
        return self._waiting_byte_size + self._transport.get_write_buffer_size()

    def write(self, parts: Sequence[Buffer], byte_size: int, releases: Collection[Callable[[], None]] = ()) -> None:
        """Write `parts`, which have `byte_size` bytes, and call `releases` when they are not used any more."""
        if byte_size <= COPIED_RESPONSE_BYTE_SIZE and not self._waiting:
            self._transport.writelines(parts)
            self._releases.add(releases)
            return
        self._waiting += [memoryview(part).cast("B") for part in parts if len(part)]
        self._waiting += releases
        self._waiting_byte_size += byte_size
        if not self._scheduled:
            self._write_piece()

    def resume(self) -> None:
        """The transport has written all that it was given."""
        self._releases.run()
        if self._waiting and not self._scheduled:
            self._write_piece()

    def close(self) -> None:
        """The connection is lost: nothing more is written, and all memory is released."""
        waiting, self._waiting, self._waiting_byte_size = self._waiting, deque(), 0
        self._releases.run()
        for each in waiting:
            if not isinstance(each, memoryview):
                each()

    def _write_piece(self) -> None:
        """Write as much as this iteration has room for, unless the transport has something left to write."""
        self._scheduled = False
        transport, budget = self._transport, self._budget
        if not self._waiting or transport.is_closing() or transport.get_write_buffer_size():
            return  # `resume` or `close` follows
        loop = asyncio.get_running_loop()
        if budget.is_fresh:
            loop.call_soon(budget.reset)
        piece, releases = self._take(budget.room)
        byte_size = sum(map(len, piece))
        budget.moved(byte_size)
        self._waiting_byte_size -= byte_size
        transport.writelines(piece)
        self._releases.add(releases)
        if not self._waiting:
            self._written()
        elif not transport.get_write_buffer_size():
            self._scheduled = True
            loop.call_soon(self._write_piece)

    def _take(self, room: int) -> tuple[list[memoryview], list[Callable[[], None]]]:
        """Take at most `room` bytes of what waits, and what is to be called after them."""
        waiting = self._waiting
        piece: list[memoryview] = []
        releases: list[Callable[[], None]] = []
        while waiting:
            first = waiting[0]
            if not isinstance(first, memoryview):
                releases.append(first)
            elif not room:
                break
            elif len(first) > room:
                piece.append(first[:room])
                waiting[0] = first[room:]
                break
            else:
                piece.append(first)
                room -= len(first)
            waiting.popleft()
        return piece, releases
