"""Large bodies through aiohttp: requests are read within limits of bytes and time, responses are sent in pieces.

`read_body` and `read_body_into` read a request. `BodyCollector` is where its parts go: small bodies to ordinary memory,
others to memory that is counted. `send` and `write` send a response piece by piece: aiohttp would copy it as a whole,
and keep what is not read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from kernel.errors import InvalidArgument
from protocols.http import web
from protocols.http.aiohttp_internals import send_continue
from protocols.http.client_limits import MAX_CHUNKS, TIMEOUTS
from protocols.http.responses import SERVER_HEADER
from protocols.request_limits import MAX_CONTROL_BYTE_SIZE, RECEIVE_BUFFER_BYTE_SIZE
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.errors import ServingError
    from protocols.http.call import HttpCall
    from protocols.http.responses import HttpResponse
    from shm.arena import Block
    from shm.tensor import Buffer


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
    return await read_body(call.http, call.max_input_size, call.json_too_large)


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


# ---- where the parts of a request go ---------------------------------------------------------


#: A body of unknown length gets blocks that are as large as all before together, within these bounds.
_LEAST_BLOCK, _MOST_BLOCK = 256 << 10, 16 << 20


class BodyCollector:
    """Collects the parts of one body, in a `with` block: at its end all memory but the `sources` is released."""

    def __init__(self, take: Callable[[int], Block], announced: int | None) -> None:
        """`take` returns a block of that many bytes, or raises `ArenaFull`. `announced` is the length, if known."""
        self._take = take
        self._announced = announced
        self._small: list[bytes] = []
        self._blocks: list[Block] = []
        #: How many bytes of the last block are filled.
        self._filled = 0
        self.byte_size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    @property
    def is_small(self) -> bool:
        """Whether the body is in ordinary memory."""
        return not self._blocks

    def add(self, part: bytes) -> None:
        """Take the next bytes. Raises `ArenaFull`."""
        self.byte_size += len(part)
        if self._blocks or self.byte_size > RECEIVE_BUFFER_BYTE_SIZE:
            earlier, self._small = self._small, []
            for each in (*earlier, part):
                self._store(each)
        else:
            self._small.append(part)

    def _store(self, part: bytes) -> None:
        rest = memoryview(part)
        while len(rest):
            room = self._blocks[-1].byte_size - self._filled if self._blocks else 0
            if not room:
                room, self._filled = self._add_block(len(rest)), 0
            count = min(room, len(rest))
            self._blocks[-1].view()[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]

    def _add_block(self, least: int) -> int:
        """Take one more block with room for `least` bytes or more; returns its size."""
        stored = sum(block.byte_size for block in self._blocks)
        if self._announced is not None and self._announced - stored >= least:
            byte_size = self._announced - stored
        else:
            byte_size = max(least, min(max(stored, _LEAST_BLOCK), _MOST_BLOCK))
        self._blocks.append(self._take(byte_size))
        return byte_size

    def body(self) -> bytes:
        """Return a small body."""
        assert self.is_small, "a large body is in blocks"
        return b"".join(self._small)

    def sources(self) -> list[Tensor]:
        """Return the body as sources of a task, whose leases are the caller's from now on."""
        if self.is_small:
            return [Tensor("", "UINT8", [self.byte_size], self.body())]
        blocks, self._blocks = self._blocks, []
        sources = []
        for block in blocks:
            span = block.span
            if block is blocks[-1]:
                span = type(span)(span.lease, span.offset, self._filled)
            sources.append(Tensor("", "UINT8", [span.byte_size], None, span))
        return sources

    def release(self) -> None:
        """Release the memory of what was collected. A second call, or one after `sources`, does nothing."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            block.release()


# ---- responses -------------------------------------------------------------------------------


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
