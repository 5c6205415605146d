"""Reading request bodies that aiohttp receives: within a limit of bytes, and a limit of time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument
from protocols.body_sizes import MAX_CONTROL_BYTE_SIZE
from protocols.http import web
from protocols.http.aiohttp_internals import send_continue
from protocols.http.client_timeouts import MAX_CHUNKS, TIMEOUTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from protocols.http.call import HttpCall


#: The number of parts of a body that are read before other clients are served.
_PARTS_AT_A_TIME = 128

#: How exact the time limits are: a part of the longest pause. To set a timer for each part takes long.
_CHECKS = 64


class TooManyChunks(Exception):
    """The body has too many chunks; the message is what the client reads."""

    def __init__(self) -> None:
        super().__init__(
            f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. Send fewer or larger HTTP chunks."
        )


class BodyTooSlow(Exception):
    """The body stopped, or came too slowly."""


async def read_body(http: web.BaseRequest, limit: int, refuse: Callable[[int], ServingError]) -> bytes:
    """Return the body as it was sent, still compressed.

    A body of more than `limit` bytes raises `refuse(byte_size)`, without reading it where its size is
    announced. Raises also `InvalidArgument` for broken chunks, `TooManyChunks`, `BodyTooSlow`, and
    `ConnectionError` where the client has disconnected.
    """
    parts: list[bytes] = []
    await read_body_into(http, limit, refuse, parts.append)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_body_into(
    http: web.BaseRequest, limit: int, refuse: Callable[[int], ServingError], add: Callable[[bytes], None]
) -> None:
    """Call `add` with each part of the body as it comes. Raises the same as `read_body`, and what `add` raises."""
    announced = http.content_length
    if announced is not None and announced > limit:
        raise refuse(announced)
    content = http.content
    try:
        if content.is_eof() and not _is_chunked(http):  # all of it came with the headers
            body = content.read_nowait(-1)
            if len(body) > limit:
                raise refuse(len(body))
            add(body)
            return
        if http.headers.get("Expect", "").lower() == "100-continue":
            await send_continue(http)
        await _read_parts(http, limit, refuse, add)
    except web.RequestPayloadError as error:
        raise InvalidArgument(f"the request body is malformed: {error}") from None


async def _read_parts(
    http: web.BaseRequest, limit: int, refuse: Callable[[int], ServingError], add: Callable[[bytes], None]
) -> None:
    loop = asyncio.get_running_loop()
    start = checked_s = loop.time()
    byte_size = chunks = parts = 0
    try:
        async with asyncio.timeout(TIMEOUTS.body_s) as timer:
            while True:
                part, ends_chunk = await _read_part(http)
                if not part and not ends_chunk:
                    break
                chunks += ends_chunk
                if chunks > MAX_CHUNKS:
                    raise TooManyChunks
                byte_size += len(part)
                if byte_size > limit:
                    raise refuse(byte_size)
                add(part)
                parts += 1
                if parts % _PARTS_AT_A_TIME == 0:
                    await asyncio.sleep(0)  # parts that have come are read without a pause
                now_s = loop.time()
                if now_s - checked_s >= TIMEOUTS.body_s / _CHECKS:
                    checked_s = now_s
                    timer.reschedule(min(now_s + TIMEOUTS.body_s, TIMEOUTS.body_end_s(start, byte_size)))
    except TimeoutError:
        raise BodyTooSlow from None


async def _read_part(http: web.BaseRequest) -> tuple[bytes, bool]:
    """Return the next bytes, and whether a chunk ends with them; nothing and False at the end of the body."""
    if _is_chunked(http):
        return await http.content.readchunk()
    return await http.content.readany(), False


def _is_chunked(http: web.BaseRequest) -> bool:
    return "Transfer-Encoding" in http.headers


async def read_json_text(call: HttpCall) -> bytes:
    """Return a body that is JSON as a whole. Raises the same as `read_body`."""
    return await read_body(call.http, call.max_input_size, lambda byte_size: json_too_large(call, byte_size))


async def read_control_text(call: HttpCall) -> bytes:
    """Return the body of a request that only controls the server, which has no tensors and no files.

    Raises the same as `read_body`.
    """
    if call.max_input_size <= MAX_CONTROL_BYTE_SIZE:
        return await read_json_text(call)
    return await read_body(call.http, MAX_CONTROL_BYTE_SIZE, _control_too_large)


def _control_too_large(byte_size: int) -> ServingError:
    return InvalidArgument(
        f"request JSON size of {byte_size} bytes exceeds the maximum allowed input size of {MAX_CONTROL_BYTE_SIZE} "
        "bytes for requests without tensors and files."
    )


def json_too_large(call: HttpCall, byte_size: int) -> ServingError:
    return InvalidArgument(
        f"request JSON size of {byte_size} bytes exceeds the maximum allowed input size of "
        f"{call.max_input_size} bytes. Use --http-max-input-size to increase the limit."
    )
