"""gRPC of one connection of `naiad bench`: prepared messages out as frames of HTTP/2, responses counted. Pure.

Neither side uses HPACK's dynamic table, so that equal headers are equal bytes: what a block of them means is found by
its bytes. A unary call has a stream of its own; with `streaming`, one stream takes all requests of the connection.
"""

from __future__ import annotations

import struct
import urllib.parse
from typing import TYPE_CHECKING

import hpack

from protocols.clients.http_load import DONE, FAILED, INCOMPLETE, MAX_ERROR_BYTE_SIZE
from protocols.grpc.h2 import frames
from protocols.grpc.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    GOAWAY,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PING,
    PRIORITY_FLAG,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Setting,
    frame_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How many received bytes are given back to the server's windows at once.
_WINDOW_STEP = 1 << 29
_MAX_KNOWN_BLOCKS = 256
#: Large responses come in few frames.
_MAX_FRAME_BYTE_SIZE = 1 << 20
_LAST_STREAM = frames.STREAM_ID_MASK - 16

_PREFIX = struct.Struct(">BL")

#: The entry of the parameters of a response that is the last one of its request, as protobuf writes it.
FINAL_RESPONSE = b"\x0a\x15triton_final_response\x12\x02\x08\x01"

#: Tags of ModelStreamInferResponse: its text of an error, and its response; of that, the outputs.
_ERROR_MESSAGE, _INFER_RESPONSE, _OUTPUTS = 1, 2, 5


def connect(head: bytes, *, streaming: bool, has_final: bool) -> GrpcLoadState:
    """Return the state of a new connection.

    `head` is the block of headers of each call. `has_final`: with `streaming`, a response says whether it is the last
    one of its request; else each request has one response.
    """
    return GrpcLoadState(head, streaming=streaming, has_final=has_final)


def sequence_id_bytes(sequence_id: int) -> bytes:
    """Return the id of a sequence as it stands in a request: a varint of protobuf."""
    found = bytearray()
    while sequence_id > 127:
        found.append(sequence_id & 127 | 128)
        sequence_id >>= 7
    found.append(sequence_id)
    return bytes(found)


class GrpcLoadState:
    """One connection with at most one request in flight."""

    def __init__(self, head: bytes, *, streaming: bool, has_final: bool = False) -> None:
        self._head = head
        self._has_final = has_final
        self._streaming = streaming
        settings = frames.settings(
            [
                (Setting.HEADER_TABLE_SIZE, 0),
                (Setting.ENABLE_PUSH, 0),
                (Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW),
                (Setting.MAX_FRAME_SIZE, _MAX_FRAME_BYTE_SIZE),
            ]
        )
        window = frames.window_update(0, MAX_WINDOW - frames.DEFAULT_WINDOW_BYTE_SIZE)
        #: What must be sent before anything else.
        self.pending = frames.PREFACE + settings + window
        self._decoder = hpack.Decoder()
        self._statuses: dict[bytes, tuple[int, str]] = {}
        self._buffer = b""
        self._block, self._block_ends_stream = b"", 0
        self._stream = -1
        self._connection_window = self._initial_window = frames.DEFAULT_WINDOW_BYTE_SIZE
        self._stream_window = 0
        self._frame_byte_size = frames.DEFAULT_MAX_FRAME_BYTE_SIZE
        #: What could not be sent yet of the message in flight.
        self._rest = memoryview(b"")
        self._received = self._received_on_stream = 0
        #: The beginning of a message on the stream of `streaming`.
        self._message = bytearray()
        self.responses = 0
        #: Bytes of a frame that are still to come and need not be looked at.
        self.left = 0
        self.error = ""
        self.usable = True

    def begin(self, request: bytes) -> bytes:
        """Return the bytes that send a request, with the prefix of gRPC. The response of the last one is complete."""
        self.responses = 0
        start = b""
        if not self._streaming or self._stream < 0:
            self._stream += 2
            self._stream_window = self._initial_window
            flags = END_HEADERS
            start = frame_header(len(self._head), HEADERS, flags, self._stream) + self._head
            self._received_on_stream = 0
            if self._stream > _LAST_STREAM:
                self.usable = False
        size = len(request)
        if size <= self._frame_byte_size and size <= self._stream_window and size <= self._connection_window:
            self._stream_window -= size
            self._connection_window -= size
            end = 0 if self._streaming else END_STREAM
            return start + frame_header(size, DATA, end, self._stream) + request
        self._rest = memoryview(request)
        return start + self.more()

    def more(self) -> bytes:
        """Return what can be sent now: the next frames of a large message, as far as the server's windows allow."""
        parts: list[bytes | memoryview] = []
        while self._rest:
            size = min(len(self._rest), self._frame_byte_size, self._stream_window, self._connection_window)
            if size <= 0:
                break
            last = size == len(self._rest) and not self._streaming
            parts += (frame_header(size, DATA, END_STREAM if last else 0, self._stream), self._rest[:size])
            self._rest = self._rest[size:]
            self._stream_window -= size
            self._connection_window -= size
        return b"".join(parts)

    def skip(self, byte_size: int) -> int:
        """Take that many bytes of `left`, which nobody looks at. Returns the outcome."""
        self.left -= byte_size
        return INCOMPLETE

    def closed(self) -> int:
        """The server has closed the connection. Returns the outcome of the request in flight."""
        return self._broken("the server closed the connection before its response was complete")

    def feed(self, data: bytes) -> int:
        """Take received bytes. Returns what they mean for the request in flight."""
        position = self.left
        if position:  # the rest of a response's message
            if position >= len(data):
                self.left -= len(data)
                return INCOMPLETE
            self.left = 0
        elif self._buffer:
            data = self._buffer + data
        size, outcome = len(data), INCOMPLETE
        while size - position >= 9:
            high, low, kind, flags, stream = FRAME_HEADER.unpack_from(data, position)
            end = position + 9 + (high << 8 | low)
            if end > size:
                if kind == DATA and not self._streaming:
                    self._count_data(high << 8 | low)
                    self.left, position = end - size, size
                break
            if kind == HEADERS and flags & END_HEADERS and not flags & (PADDED | PRIORITY_FLAG):
                found = self._take_block(data[position + 9 : end], flags)
            elif kind == DATA:
                found = self._take_data(data[position + 9 : end], flags, end - position - 9)
            else:
                found = self._take(kind, flags, stream, data[position + 9 : end])
            if found:
                outcome = found
            position = end
        self._buffer = data[position:]
        return outcome

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> int:
        """Take a frame that is rare."""
        if kind == WINDOW_UPDATE:
            increment = int.from_bytes(payload) & frames.STREAM_ID_MASK
            if not stream:
                self._connection_window += increment
            elif stream == self._stream:
                self._stream_window += increment
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)
        elif kind == PING and not flags & ACK:
            self.pending += frames.ping_ack(memoryview(payload))
        elif kind in (HEADERS, CONTINUATION):
            return self._take_part_of_block(kind, flags, payload)
        elif kind == RST_STREAM and stream == self._stream:
            return self._broken(f"the server has reset the stream, with the code {int.from_bytes(payload)}")
        elif kind == GOAWAY:
            text = payload[8:].decode("utf-8", "replace")
            return self._broken(f"the server has ended the connection: {text or 'GOAWAY'}")
        return INCOMPLETE

    def _take_settings(self, payload: bytes) -> None:
        for setting, value in frames.settings_entries(memoryview(payload)):
            if setting == Setting.INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif setting == Setting.MAX_FRAME_SIZE:
                self._frame_byte_size = value
        self.pending += frames.SETTINGS_ACK

    def _take_part_of_block(self, kind: int, flags: int, payload: bytes) -> int:
        if kind == HEADERS:
            begin, end = 0, len(payload)
            if flags & PADDED:
                begin, end = 1, len(payload) - payload[0]
            if flags & PRIORITY_FLAG:
                begin += 5
            self._block = payload[begin:end]
            self._block_ends_stream = flags & END_STREAM
        else:
            self._block += payload
        return self._take_block(self._block, self._block_ends_stream) if flags & END_HEADERS else INCOMPLETE

    def _take_block(self, block: bytes, flags: int) -> int:
        found = self._statuses.get(block)
        if found is None:
            found = self._status(block)
        if not flags & END_STREAM:
            return INCOMPLETE
        status, text = found
        if self._streaming:
            return self._broken(text if status else "the server has ended the stream")
        if status:
            self.error = text
            self._rest = memoryview(b"")
            return FAILED
        self.responses = 1
        return DONE

    def _status(self, block: bytes) -> tuple[int, str]:
        """Return the status in a block of headers, and its text."""
        try:
            headers = {str(name): str(value) for name, value in (each[:2] for each in self._decoder.decode(block))}
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            return 2, f"the server's headers cannot be read: {error}"
        status = headers.get("grpc-status", "0")
        text = urllib.parse.unquote(headers.get("grpc-message", ""))[:MAX_ERROR_BYTE_SIZE]
        if headers.get(":status", "200") != "200":
            found = (2, f"status {headers[':status']} of HTTP: no gRPC server")
        else:
            found = (int(status) if status.isdigit() else 2, f"gRPC status {status}: {text}")
        # A block that changes the dynamic table must be decoded each time.
        if len(self._statuses) < _MAX_KNOWN_BLOCKS and not self._decoder.header_table.dynamic_entries:
            self._statuses[block] = found
        return found

    def _count_data(self, byte_size: int) -> None:
        """Give received bytes back to the server's windows."""
        self._received += byte_size
        self._received_on_stream += byte_size
        if self._received > _WINDOW_STEP:
            self.pending += frames.window_update(0, self._received)
            self._received = 0
        if self._received_on_stream > _WINDOW_STEP:
            self.pending += frames.window_update(self._stream, self._received_on_stream)
            self._received_on_stream = 0

    def _take_data(self, payload: bytes, flags: int, byte_size: int) -> int:
        self._count_data(byte_size)
        if not self._streaming:
            return INCOMPLETE
        if flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        self._message += payload
        outcome = INCOMPLETE
        while len(self._message) >= _PREFIX.size:
            _, size = _PREFIX.unpack_from(self._message)
            if len(self._message) < _PREFIX.size + size:
                break
            outcome = self._take_message(bytes(self._message[_PREFIX.size : _PREFIX.size + size])) or outcome
            del self._message[: _PREFIX.size + size]
        return outcome

    def _take_message(self, message: bytes) -> int:
        """Take a ModelStreamInferResponse."""
        if not message or message[0] == _ERROR_MESSAGE << 3 | 2:
            self.error = next((part for tag, part in fields(message) if tag == _ERROR_MESSAGE), b"").decode(
                "utf-8", "replace"
            )[:MAX_ERROR_BYTE_SIZE]
            return FAILED
        if not self._has_final:
            self.responses += 1
            return DONE
        if FINAL_RESPONSE not in message:
            self.responses += 1
            return INCOMPLETE
        response = next((part for tag, part in fields(message) if tag == _INFER_RESPONSE), b"")
        self.responses += any(tag == _OUTPUTS for tag, _ in fields(response))
        return DONE

    def _broken(self, text: str) -> int:
        self.usable = False
        self.error = text
        return FAILED


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a protobuf message that have a length: their number and their bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        if key & 7 == 2:
            size, position = _varint(message, position)
            yield key >> 3, message[position : position + size]
            position += size
        elif key & 7 == 0:
            _, position = _varint(message, position)
        else:
            position += 8 if key & 7 == 1 else 4


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(message):
        octet = message[position]
        position += 1
        value |= (octet & 127) << shift
        if octet < 128:
            break
        shift += 7
    return value, position
