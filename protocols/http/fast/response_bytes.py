"""Responses as bytes, as aiohttp would write them. Pure but for the clock of the `Date` header."""

from __future__ import annotations

import email.utils
import functools
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from protocols.http.responses import JSON, PLAIN, SERVER_HEADER, error_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.tensor import Buffer

_SERVER = "".join(f"{name}: {value}\r\n" for name, value in SERVER_HEADER.items())


def reply_head(status: int, content_type: str, byte_size: int, more: bytes = b"") -> bytes:
    """Return the head of a response. `more` are headers with their line ends."""
    before, after = _constant_parts(status, content_type)
    return b"%b%b%b%d%b" % (before, more, after, byte_size, _date(int(time.time())))


def error_reply(status: int, text: str, *, plain: bool) -> ResponseBytes:
    """Return the response that tells an error; `plain` as for `replies.error_reply`."""
    body = error_body(text)
    return ResponseBytes(reply_head(status, PLAIN if plain else JSON, len(body)) + body)


class ResponseBytes(msgspec.Struct):
    """A whole HTTP response: its head, and what follows it."""

    head: bytes
    parts: list[Buffer] = []
    #: To be called when the parts have left: they are memory of a worker.
    release: Callable[[], None] | None = None

    @property
    def byte_size(self) -> int:
        return len(self.head) + sum(map(len, self.parts))

    def last(self) -> ResponseBytes:
        """Return the same with the word that the connection is closed after it."""
        head = self.head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        return ResponseBytes(head, self.parts, self.release)


@functools.cache
def _constant_parts(status: int, content_type: str) -> tuple[bytes, bytes]:
    before = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{_SERVER}"
    return before.encode(), f"Content-Type: {content_type}\r\nContent-Length: ".encode()


@functools.lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return f"\r\nDate: {email.utils.formatdate(second, usegmt=True)}\r\n\r\n".encode()
