"""Sends large bodies through aiohttp in pieces: aiohttp would copy them as a whole, and keep what is not read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from protocols.http import web
from protocols.http.client_timeouts import TIMEOUTS
from protocols.http.responses import SERVER_HEADER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocols.http.call import HttpCall
    from protocols.http.inference.response import HttpResponse
    from shm.tensor import Buffer

#: Larger bodies are sent in pieces of this size.
PIECE_BYTE_SIZE = 256 << 10


async def send(call: HttpCall, response: HttpResponse) -> web.StreamResponse:
    """Return the response for aiohttp, which is sent already if it is large. Releases its source."""
    headers = {**SERVER_HEADER, **response.headers}
    byte_size = sum(map(len, response.body))
    try:
        if byte_size <= PIECE_BYTE_SIZE:
            body = b"".join(response.body)
            return web.Response(status=response.status, body=body, content_type=response.content_type, headers=headers)
        headers |= {"Content-Type": response.content_type, **call.response_headers}
        stream = web.StreamResponse(status=response.status, headers=headers)
        stream.content_length = byte_size
        await stream.prepare(call.http)
        await write(stream, response.body)
        return stream
    finally:
        if response.source is not None:
            response.source.release()


async def write(stream: web.StreamResponse, parts: Sequence[Buffer]) -> None:
    """Write `parts` of a body. Raises `ConnectionResetError` if the client does not read, or has disconnected."""
    try:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), PIECE_BYTE_SIZE):
                async with asyncio.timeout(TIMEOUTS.send_s):
                    await stream.write(bytes(view[start : start + PIECE_BYTE_SIZE]))
                await asyncio.sleep(0)  # a client that reads fast takes every piece at once
    except TimeoutError:
        raise ConnectionResetError("the client does not read its response") from None
