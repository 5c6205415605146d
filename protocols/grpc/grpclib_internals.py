"""All undocumented parts of grpclib that we use. No other module uses them.

An update of grpclib may break what is here: `tests/protocols/grpc/test_grpclib_internals.py` says so first. Used are

- `grpclib.server.request_handler`, which looks a call's handler up, runs it under its deadline and sends its status.
  `CallStream` is what it and `grpclib.server.Stream` want of the stream that they are given; `HandlerCall` is one.
  It needs a codec (`ProtoCodec`) and a receiver of its events (`_DispatchServerEvents`).
- `Wrapper.cancel`, which ends a handler with an error as the status. `request_handler` gives each call one.
- `Stream._stream`, the stream that a handler was given, as we gave it.
- `Peer`, made of a transport.
- `StreamClosedError` of h2, which grpclib expects where a client has disconnected while a response is sent.
- the functions of `grpclib.metadata` that decode headers and encode texts. `status_text` uses them for texts that
  are always encodable, and short enough for a trailer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from grpclib.encoding.proto import ProtoCodec
from grpclib.events import _DispatchServerEvents
from grpclib.metadata import decode_bin_value, decode_metadata, decode_timeout, encode_grpc_message
from grpclib.protocol import Peer
from grpclib.server import request_handler
from grpclib.utils import Wrapper
from h2.exceptions import StreamClosedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine, Mapping

    from grpclib.const import Handler
    from grpclib.server import Stream

__all__ = [
    "MAX_STATUS_BYTE_SIZE",
    "CallConnection",
    "CallStream",
    "Peer",
    "StreamClosedError",
    "Wrapper",
    "clean",
    "decode_bin_value",
    "decode_metadata",
    "decode_timeout",
    "encode_grpc_message",
    "run_handler",
    "status_text",
    "stream_of",
]

_CODEC = ProtoCodec()

_EVENTS = _DispatchServerEvents()


class CallConnection:
    """What grpclib asks of a call's connection: the peer, and counters that nobody reads."""

    messages_received = 0
    messages_sent = 0
    last_message_received: float | None = None
    last_message_sent: float | None = None

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def get_peer(self) -> Peer:
        return Peer(self._transport)


class CallStream(Protocol):
    """What grpclib asks of the stream of a call."""

    connection: CallConnection
    #: Set by `run_handler`, before the handler starts; None until then.
    wrapper: Wrapper | None
    #: Only asked whether it is closing.
    _transport: asyncio.Transport

    async def recv_data(self, size: int) -> bytes:
        """Return the five bytes before the next message, then the message; empty behind the last one."""

    async def send_headers(self, headers: list[tuple[str, str]], end_stream: bool = False) -> None:
        """Send headers, or trailers with `end_stream`. Raises `StreamClosedError`."""

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Send a message with the five bytes before it. Raises `StreamClosedError`."""

    async def reset(self) -> None:
        """End the stream; for handlers that cancel their call."""

    def reset_nowait(self) -> None:
        """End the stream, behind a status that is not OK."""

    @property
    def closable(self) -> bool:
        """Whether the client has not gone."""

    def release(self) -> object:
        """The handler has ended, however."""


def run_handler(
    mapping: Mapping[str, Handler], stream: CallStream, fields: list[tuple[str, str]]
) -> Coroutine[Any, Any, None]:
    """Return what finds the handler of a call with the headers `fields`, runs it and sends its status."""
    return request_handler(
        mapping,  # type: ignore[arg-type]  # nothing is put into it
        stream,  # type: ignore[arg-type]  # all that is used of grpclib's own
        fields,
        _CODEC,
        None,
        _EVENTS,
        stream.release,
    )


def stream_of(stream: Stream[Any, Any]) -> object:
    """Return the stream that `run_handler` was given, from what the handler is given."""
    return stream._stream


#: gRPC clients refuse trailers that are larger than 8 KiB, and then show no part of the text.
MAX_STATUS_BYTE_SIZE = 7 * 1024


def clean(text: str) -> str:
    """Return `text` with `?` for what UTF-8 cannot encode, such as bytes of a file name that is not UTF-8."""
    return text.encode(errors="replace").decode()


def status_text(text: str) -> str:
    """Return `text` for a status, cut to a length at which its encoded form is not too large."""
    text = clean(text[:MAX_STATUS_BYTE_SIZE])  # a character is at least one byte
    while (excess := len(encode_grpc_message(text)) - MAX_STATUS_BYTE_SIZE) > 0:
        # A character becomes up to 12 bytes ("%F0%9F%98%80"): cutting this many never cuts too much.
        text = text[: -max(1, excess // 12)]
    return text
