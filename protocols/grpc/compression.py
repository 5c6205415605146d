"""How responses of inference are compressed (--grpc-infer-response-compression-level).

The level chooses an algorithm among those that the client accepts, as gRPC core does it
(`CompressionAlgorithmForLevel`); a message that would not become smaller is not compressed. Large ones are compressed
in threads, so that no other call waits.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

from protocols.grpc.framing import PREFIX, WINDOW_BITS
from protocols.grpc.h2.headers import OK_TRAILERS, RESPONSE_BLOCK, encode_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocols.grpc.h2.headers import RequestHead
    from protocols.grpc.h2.streams import Stream
    from protocols.grpc.h2.transport import ServerConnection
    from shm.tensor import Buffer

#: Up to here compressing takes less time than passing the message to a thread and back (about 0.3 ms).
_INLINE_BYTE_SIZE = 8 * 2**10


class ResponseCompression:
    """Compresses for the clients that accept it. Made only where the level asks for it."""

    def __init__(self, level: str) -> None:
        """`level` is low, medium or high."""
        self._level = level

    def choose(self, request_head: RequestHead) -> str | None:
        """Return the algorithm for the responses of a call, None for none."""
        accepted = next((value for name, value in request_head.fields if name == "grpc-accept-encoding"), "")
        names = {name.strip() for name in accepted.split(",")}
        ranked = [name for name in WINDOW_BITS if name in names]
        if not ranked:
            return None
        rank = {"low": 0, "medium": len(ranked) // 2, "high": len(ranked) - 1}[self._level]
        return ranked[rank]

    def respond(
        self, connection: ServerConnection, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None]
    ) -> None:
        """Respond to a unary call, now or later, with the message in `parts`; see `SendingHalf.respond`."""
        encoding = self.choose(stream.request_head)
        if encoding is None:
            connection.sending.respond(stream, parts, release)
            connection.schedule_write()
        elif sum(map(len, parts)) <= _INLINE_BYTE_SIZE:
            message = compressed(encoding, parts)
            release()
            _respond(connection, stream, encoding, message)
        else:

            def respond_with(done: asyncio.Future[bytes]) -> None:
                release()
                if stream.is_open:  # its client may have gone
                    _respond(connection, stream, encoding, done.result())

            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, compressed, encoding, parts).add_done_callback(respond_with)


def compressed(encoding: str, parts: Sequence[Buffer]) -> bytes:
    """Return a message with its prefix, compressed where that makes it smaller."""
    byte_size = sum(map(len, parts))
    compressor = zlib.compressobj(wbits=WINDOW_BITS[encoding])
    pieces = [compressor.compress(part) for part in parts]
    pieces.append(compressor.flush())
    size = sum(map(len, pieces))
    if size >= byte_size:
        return b"".join((PREFIX.pack(0, byte_size), *parts))
    return b"".join((PREFIX.pack(1, size), *pieces))


async def compress(encoding: str, parts: Sequence[Buffer]) -> bytes:
    """Return what `compressed` returns; other calls do not wait for it."""
    if sum(map(len, parts)) <= _INLINE_BYTE_SIZE:
        return compressed(encoding, parts)
    return await asyncio.to_thread(compressed, encoding, parts)


def _respond(connection: ServerConnection, stream: Stream, encoding: str, message: bytes) -> None:
    sending = connection.sending
    sending.send_headers(stream, RESPONSE_BLOCK + encode_block([("grpc-encoding", encoding)]))
    sending.send_data(stream, [message])
    sending.send_trailers(stream, OK_TRAILERS)
    connection.schedule_write()


def make_compression(level: str) -> ResponseCompression | None:
    """Return the compression for a value of the flag, None where nothing is compressed."""
    return None if level == "none" else ResponseCompression(level)
