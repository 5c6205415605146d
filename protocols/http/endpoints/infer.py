"""POST /v2/models/M/infer where aiohttp has the connection: chunked or compressed bodies, HTTP/1.0, `Expect` and so on.

Receives the body, and leaves the rest to `HttpInferCall`, as the fast path does.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from aiohttp import web

from kernel.errors import InvalidArgument
from protocols.body_sizes import MAX_BODY_BYTE_SIZE
from protocols.http.body import json_too_large, read_body
from protocols.http.call import REQUEST_ID
from protocols.http.inference.call import ENTRY_POINT, HEADER_LENGTH, THREAD_BYTE_SIZE, HttpInferCall
from protocols.http.inference.compression import (
    IDENTITY,
    SUPPORTED,
    UnsupportedCompression,
    check_encoding,
    choose_encoding,
    decompress,
    inflated_too_large,
)
from protocols.http.inference.head import InferRequestHead
from protocols.http.responses import SERVER_HEADER
from protocols.peer_identity import Peer

if TYPE_CHECKING:
    from protocols.http.call import HttpCall
    from protocols.http.inference.response import HttpResponse

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_NUMBER = re.compile(r"-?[0-9]+", re.ASCII)


async def infer(call: HttpCall) -> web.Response:
    """Execute a request that has exactly one response. Raises `ServingError` until the body is there."""
    http = call.http
    name, version = call.names["model"], call.names["version"]
    model = call.kernel.resolve_unary(name, version, ENTRY_POINT)
    announced = _announced_header_length(call)
    body = await _receive(call, announced)
    offers = http.headers.getall("Accept-Encoding", ())
    head = InferRequestHead(
        model=model,
        model_name=name,
        model_version=version,
        target=http.raw_path,
        body_byte_size=len(body),
        header_length=_header_length(announced, len(body)),
        encoding=choose_encoding(",".join(offers)) if offers else IDENTITY,
        forwarded=call.rules.forwarded(http.raw_headers),
    )
    waiter = _FutureWaiter(Peer(http.transport))
    infer_call = AiohttpInferCall(call.inference, head, waiter)
    infer_call.start(body)
    http[REQUEST_ID] = infer_call.request_id
    # The kernel keeps what it needs: a large body is in its arena as soon as it has accepted the request.
    del body
    try:
        await waiter.done
    except asyncio.CancelledError:
        infer_call.cancel()
        raise
    assert infer_call.response is not None, "the call has no response"
    return infer_call.response


class AiohttpInferCall(HttpInferCall):
    """A call whose response aiohttp sends."""

    response: web.Response | None = None

    def finish(self, response: HttpResponse) -> None:
        body = response.body[0] if len(response.body) == 1 else b"".join(response.body)
        if response.source is not None:
            response.source.release()
        self.response = web.Response(
            status=response.status,
            body=body,
            content_type=response.content_type,
            headers={**SERVER_HEADER, **response.headers},
        )
        self._left()


class _FutureWaiter:
    """A `ResponseWaiter` for a coroutine."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def response_ready(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


# ---- the body ------------------------------------------------------------------------------


def _announced_header_length(call: HttpCall) -> int | None:
    """Return the length of the JSON header that the client announces, None where it announces none.

    A text without any digit counts as 0, which makes the request a raw one (Triton).
    """
    texts = call.http.headers.getall(HEADER_LENGTH, ())
    if not texts:
        return None
    text = ", ".join(texts)
    if len(texts) == 1 and text and not any(character.isdigit() for character in text):
        return 0
    if len(texts) > 1 or not _NUMBER.fullmatch(text):
        raise InvalidArgument(f"Unable to parse {HEADER_LENGTH}, got: {text}")
    number = int(text) if len(text) <= len(str(_INT32_MIN)) else _INT32_MAX + 1
    if not _INT32_MIN <= number <= _INT32_MAX:
        raise InvalidArgument(
            f"Unable to parse {HEADER_LENGTH}, value is out of range [ {_INT32_MIN}, {_INT32_MAX} ], got: {text}"
        )
    return number


def _header_length(announced: int | None, body_byte_size: int) -> int:
    """Return how much of the body is JSON; 0 stands for a raw request, which an empty body is too."""
    if announced is None:
        return body_byte_size
    if not 0 <= announced <= body_byte_size:
        raise InvalidArgument(f"inference header size should be in range (0, {body_byte_size}), got: {announced}")
    return announced


async def _receive(call: HttpCall, announced: int | None) -> bytes:
    """Return the body, inflated. Raises `ServingError` for one that is too large or broken."""
    limit = call.max_input_size
    try:
        encoding = check_encoding(call.http.headers.get("Content-Encoding"))
    except UnsupportedCompression:
        call.error_headers["Accept-Encoding"] = SUPPORTED
        raise
    if encoding != IDENTITY:
        body = await read_body(call.http, limit, lambda byte_size: inflated_too_large(limit))
        return await _inflate(body, limit)
    if announced is None:
        return await read_body(call.http, limit, lambda byte_size: json_too_large(call, byte_size))
    if announced == 0:
        return await read_body(call.http, limit, lambda byte_size: _raw_too_large(byte_size, limit))
    if announced > limit:
        # A length that the body cannot have gets its own error, also above the limit.
        _header_length(announced, announced if call.http.content_length is None else call.http.content_length)
        raise json_too_large(call, announced)
    return await read_body(call.http, MAX_BODY_BYTE_SIZE, _body_too_large)


async def _inflate(body: bytes, limit: int) -> bytes:
    if len(body) < THREAD_BYTE_SIZE:
        return decompress(body, limit)
    return await asyncio.to_thread(decompress, body, limit)


def _body_too_large(byte_size: int) -> InvalidArgument:
    return InvalidArgument(
        f"Unable to parse Content-Length, value is out of range [ {_INT32_MIN}, {_INT32_MAX} ], got: {byte_size}"
    )


def _raw_too_large(byte_size: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"Raw input has a byte_size ({byte_size} bytes) that exceeds the maximum allowed value of {limit} "
        "bytes. Use --http-max-input-size to increase the limit."
    )
