"""Responses as bytes, as aiohttp would write them. Pure except for the clock of the `Date` header."""

from __future__ import annotations

import email.utils
import functools
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from protocols.http.responses import SERVER_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from protocols.http.inference.response import HttpResponse
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
