"""The HTTP response of an inference request, before it becomes bytes or an object of aiohttp. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from protocols.http.responses import error_body, error_content_type

if TYPE_CHECKING:
    from shm.tensor import Buffer


class ResponseSource(Protocol):
    """What owns the memory of a body: a response of the kernel, or a tensor that a helper has written."""

    def release(self) -> None:
        """Release the memory. A second call does nothing."""


class HttpResponse(msgspec.Struct):
    """Status, content type and body. Server, length, date and CORS headers are added when it is written."""

    status: int
    content_type: str
    body: list[Buffer]
    #: Headers of this response alone, which stand before its content type.
    headers: dict[str, str] = {}
    #: The owner of the memory that `body` refers to. It is to be released when the body was copied or sent. None where
    #: `body` refers to no shared memory.
    source: ResponseSource | None = None


def http_error(status: int, text: str, *, plain: bool) -> HttpResponse:
    """Return the response of an error; `plain` as for `protocols.http.responses.error_response`."""
    return HttpResponse(status, error_content_type(plain=plain), [error_body(text)])
