"""Responses with Triton's content types: aiohttp's (JSON, empty ones, errors), and `HttpResponse`.

`HttpResponse` is the response to an inference request before the fast path makes bytes of it, or aiohttp's object.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.version import __version__
from protocols.http import web
from protocols.status import may_retry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kernel.errors import ServingError
    from shm.tensor import Buffer

JSON = "application/json"

PLAIN = "text/plain"

#: Sent with every response; without it aiohttp would send its own version and Python's.
SERVER_HEADER = {"Server": f"naiad/{__version__}"}

#: The status of a request that lacks the header of a restricted API, as in Triton.
RESTRICTED = 403

#: Headers of a response to a request that found no memory or a full queue, or whose client has used up its quota.
_RETRY_LATER = {"Retry-After": "1"}

_encoder = msgspec.json.Encoder()


def json_response(value: Any) -> web.Response:
    """Return `value`, which msgspec can encode, as a JSON response."""
    return web.Response(body=_encoder.encode(value), content_type=JSON, headers=SERVER_HEADER)


def json_text_response(text: bytes) -> web.Response:
    return web.Response(body=text, content_type=JSON, headers=SERVER_HEADER)


def empty_response(*, plain: bool = False, status: int = 200) -> web.Response:
    """Return a response without a body; Triton's health responses are `plain`."""
    return web.Response(status=status, content_type=error_content_type(plain=plain), headers=SERVER_HEADER)


@functools.cache
def packaged_file(path: Path) -> bytes:
    """Return a file of the package, which is kept from then on. Blocks."""
    return path.read_bytes()


def error_body(text: str) -> bytes:
    """Return `{"error": text}`; what UTF-8 cannot carry, such as bytes of a path, becomes `?`."""
    return _encoder.encode({"error": text.encode(errors="replace").decode()})


def error_content_type(*, plain: bool) -> str:
    """Return the content type of an error, which is always JSON: `plain` where Triton calls it plain text."""
    return PLAIN if plain else JSON


def retry_headers(error: ServingError) -> dict[str, str]:
    """Return the headers that say when the client may send the request again; none where that would not help."""
    return _RETRY_LATER if may_retry(error) else {}


def error_response(
    status: int, text: str, *, plain: bool = False, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        status=status,
        body=error_body(text),
        content_type=error_content_type(plain=plain),
        headers={**SERVER_HEADER, **headers} if headers else SERVER_HEADER,
    )


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
