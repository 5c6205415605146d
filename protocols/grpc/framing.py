"""Messages of gRPC out of the bytes of a call: each is a compressed flag, a length and that many bytes. Pure.

A large message is received into memory of its announced size; pages are used only when bytes arrive. Small compressed
messages are inflated here, up to a limit; large ones by the code that takes them.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING

import msgspec
from grpclib.const import Status

from kernel.errors import ServingError
from protocols.large_requests import LOOP_BYTE_SIZE
from protocols.request_limits import MAX_BODY_BYTE_SIZE, RECEIVE_BUFFER_BYTE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.blocks import ByteBudget
    from shm.tensor import Buffer


class CompressedMessage(msgspec.Struct, frozen=True):
    """A message that becomes too large to be inflated on the event loop."""

    content: Buffer
    #: As in `grpc-encoding`.
    encoding: str


class RefusedMessage(msgspec.Struct, frozen=True):
    """A message that was read and forgotten, because there is no memory or no model for it."""

    error: ServingError
    #: Its first bytes.
    start: bytes


class RawPart(bytes):
    """Bytes of a call that another process responds to, whatever messages they belong to (`protocols.grpc.relay`)."""


if TYPE_CHECKING:
    #: What `MessageReader.messages` has: usually bytes.
    ReceivedMessage = Buffer | CompressedMessage | RefusedMessage

#: The types of messages that are bytes.
BYTES_TYPES = (bytes, bytearray, memoryview)

#: The largest message that a compressed one may become; HTTP has the same limit for bodies.
MAX_INFLATED_BYTE_SIZE = 64 * 2**20

#: How many bytes from the start of a large message `MessageReader.choose_buffer` gets, and how many are gathered at
#: most where it is not set.
MESSAGE_START_BYTE_SIZE = 1024

_MAX_GATHERED_BYTE_SIZE = 2**20

#: Compressions of messages that the server understands, for `grpc-accept-encoding`.
ACCEPTED_ENCODINGS = ("identity", "deflate", "gzip")

#: Compressed bytes that zlib gets in one step: at an error, and at the limit, it copies all that it has not inflated.
_INFLATED_AT_A_TIME = 256 << 10

#: zlib's window bits of the compressions, in gRPC core's order of increasing compression.
WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}

PREFIX = struct.Struct(">BL")

_PREFIX_BYTE_SIZE = PREFIX.size


#: About how many bytes a message that waits takes beside its content.
_MESSAGE_BYTE_SIZE = 64

#: A call may have this many messages waiting when there is no memory for the next one; with more it fails.
_MOST_REFUSED = 256


class MessageMemory:
    """Where messages count that were received and not taken, except for large ones, which have memory of their own."""

    def __init__(self, budget: ByteBudget, full: Callable[[], ServingError]) -> None:
        """`full` returns the error of a message for which there is no memory."""
        self.budget = budget
        self.full = full


class MessageFault(msgspec.Struct, frozen=True):
    """What is wrong with the messages of a call, as the client reads it."""

    status: Status
    text: str


class InflatedTooLarge(Exception):
    """A compressed message has more bytes than the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"Decompressed message larger than max ({limit})")


def inflate(message: Buffer, encoding: str, limit: int) -> bytes | None:
    """Return the content of a compressed message; None if it is broken. Raises `InflatedTooLarge`."""
    inflater = zlib.decompressobj(WINDOW_BITS[encoding])
    compressed, parts, byte_size = memoryview(message), [], 0
    for start in range(0, len(compressed), _INFLATED_AT_A_TIME):
        try:
            part = inflater.decompress(compressed[start : start + _INFLATED_AT_A_TIME], limit + 1 - byte_size)
        except zlib.error:
            return None
        byte_size += len(part)
        if byte_size > limit:
            raise InflatedTooLarge(limit)
        parts.append(part)
        if inflater.eof:
            return parts[0] if len(parts) == 1 else b"".join(parts)
    return None


def broken_compression(encoding: str) -> str:
    """Return the error of a message that cannot be inflated."""
    return f"unable to decompress a message ({encoding})"


class MessageReader:
    """Finds the messages of one call. After a fault it accepts no more bytes."""

    __slots__ = (
        "_compressed", "_encoding", "_filled", "_gathered", "_gathered_counted", "_kept", "_large", "_length",
        "_memory", "_refusal", "choice_follows", "choose_buffer", "fault", "max_byte_size", "messages",
    )  # fmt: skip

    def __init__(self, encoding: str, memory: MessageMemory | None = None) -> None:
        """Without `memory` what waits is not counted. Its owner calls `close` at the end of the call."""
        self._encoding = encoding
        self._memory = memory
        #: What counts in the memory: all of it, and the part of it for bytes of an incomplete message.
        self._kept = 0
        self._gathered_counted = 0
        #: The largest message, also after inflating.
        self.max_byte_size = MAX_BODY_BYTE_SIZE
        #: Bytes of a prefix, or of a small message, that are not complete.
        self._gathered = bytearray()
        #: Length of the message that is being received, -1 between messages.
        self._length = -1
        self._compressed = False
        self._large: memoryview | None = None
        self._filled = 0
        #: Why the message that is being received is forgotten, and its first bytes.
        self._refusal: RefusedMessage | None = None
        #: Messages that are complete and were not taken yet.
        self.messages: deque[ReceivedMessage] = deque()
        self.fault: MessageFault | None = None
        #: Returns the buffer for a large message by its first bytes (none for a compressed one) and its length. Raises
        #: `ServingError` for a message that is refused.
        self.choose_buffer: Callable[[bytes, int], memoryview] | None = None
        #: Whether it will be set by the handler of the call, which starts later.
        self.choice_follows = False

    def continue_from(self, other: MessageReader) -> None:
        """Go on where `other`, which is not used any more, has come to."""
        self._encoding, self._memory, self._kept = other._encoding, other._memory, other._kept
        self._gathered, self._gathered_counted = other._gathered, other._gathered_counted
        self._length, self._compressed = other._length, other._compressed
        self._large, self._filled, self._refusal = other._large, other._filled, other._refusal
        self.messages, self.fault, self.max_byte_size = other.messages, other.fault, other.max_byte_size
        self.choose_buffer, self.choice_follows = other.choose_buffer, other.choice_follows

    @property
    def between_messages(self) -> bool:
        """Whether the next byte begins a message."""
        return self._length < 0 and not self._gathered and self.fault is None

    def limit(self, max_byte_size: int) -> None:
        """Refuse messages of more bytes, also those that have arrived or begun, and more bytes after inflating."""
        self.max_byte_size = max_byte_size
        largest = max([self._length, *(len(each) for each in self.messages if isinstance(each, BYTES_TYPES))])
        if largest > max_byte_size and self.fault is None:
            self._forget_messages()
            self._refuse_size(largest, max_byte_size)

    def has_room(self, byte_size: int) -> bool:
        """Whether there is memory for `byte_size` more bytes to wait."""
        return self._memory is None or self._memory.budget.has_room(byte_size)

    def add(self, message: ReceivedMessage) -> None:
        """A message is complete."""
        self.messages.append(message)
        if self._memory is not None:
            self._count(_kept_byte_size(message))

    def take(self) -> ReceivedMessage:
        """Return the first message, of at least one."""
        message = self.messages.popleft()
        if self._memory is not None:
            self._count(-_kept_byte_size(message))
        return message

    def close(self) -> None:
        """The call has ended: messages that wait no longer count."""
        if self._memory is not None:
            self._memory.budget.remove(self._kept)
            self._memory = None

    def _count(self, byte_size: int) -> None:
        assert self._memory is not None, "nothing is counted without a budget"
        self._kept += byte_size
        self._memory.budget.used_byte_size += byte_size

    def _count_gathered(self) -> None:
        """Count the bytes of an incomplete message, which have changed."""
        if self._memory is not None and (change := len(self._gathered) - self._gathered_counted):
            self._gathered_counted += change
            self._count(change)

    def _forget_messages(self) -> None:
        self.messages.clear()
        self._gathered.clear()
        self._large, self._length = None, -1
        if self._memory is not None:
            self._gathered_counted = 0
            self._count(-self._kept)

    def feed(self, data: memoryview) -> None:
        """Take the next bytes of the call."""
        size = len(data)
        if (
            self._length < 0
            and not self._gathered
            and size >= _PREFIX_BYTE_SIZE
            and PREFIX.unpack_from(data) == (0, size - _PREFIX_BYTE_SIZE)
            and size < RECEIVE_BUFFER_BYTE_SIZE
            and self.fault is None
            and self.has_room(size)
        ):
            self.add(bytes(data[_PREFIX_BYTE_SIZE:]))  # usual: one complete message
            return
        position = 0
        while self.fault is None and position < size:
            if self._length < 0:
                position += self._take_prefix(data[position:])
            else:
                position += self._take_content(data[position:])
        self._count_gathered()

    def begin_large(self, message_start: bytes, byte_size: int) -> None:
        """Take the first bytes of a large message that is not compressed; the others go to `direct_buffer`."""
        self._gathered += message_start
        self._compressed, self._length, self._filled = False, byte_size, 0

    def end(self) -> None:
        """The client has sent its last byte."""
        if self.fault is None and (self._length >= 0 or self._gathered):
            self.fault = MessageFault(Status.INTERNAL, "Unable to parse request: the message is incomplete")

    def direct_buffer(self) -> memoryview | None:
        """Return where the next bytes of a large message belong, None if no large message is being received."""
        if self._large is None and self._refusal is None and self._is_due(directly=True):
            self._allocate()
        return self.rest_of_large()

    def rest_of_large(self) -> memoryview | None:
        """Return where the rest of a large message belongs, if the message has its own memory already; else None."""
        return None if self._large is None else self._large[self._filled :]

    def received_directly(self, byte_size: int) -> None:
        """Count `byte_size` bytes that were written to what `direct_buffer` returned."""
        self._filled += byte_size
        if self._filled == self._length:
            self._complete(self._large if self._large is not None else b"")

    def _take_prefix(self, data: memoryview) -> int:
        taken = min(_PREFIX_BYTE_SIZE - len(self._gathered), len(data))
        self._gathered += data[:taken]
        if len(self._gathered) == _PREFIX_BYTE_SIZE:
            flag, length = PREFIX.unpack(self._gathered)
            self._gathered.clear()
            self._begin(flag, length)
        return taken

    def _begin(self, flag: int, length: int) -> None:
        limit = min(MAX_INFLATED_BYTE_SIZE, self.max_byte_size) if flag else self.max_byte_size
        if flag > 1:
            self.fault = MessageFault(Status.INTERNAL, f"invalid compressed flag {flag} of a message")
        elif flag and self._encoding not in WINDOW_BITS:
            self.fault = MessageFault(Status.INTERNAL, "a compressed message, but grpc-encoding names no compression")
        elif length > limit:
            self._refuse_size(length, limit)
        else:
            self._compressed, self._length, self._filled = bool(flag), length, 0
            if not length:
                self._complete(b"")
            elif length < RECEIVE_BUFFER_BYTE_SIZE and not self.has_room(length):
                self._refuse_for_memory()

    def _refuse_for_memory(self) -> None:
        """Forget the small message that begins: all memory is in use."""
        assert self._memory is not None, "without a budget there is room"
        error = self._memory.full()
        if len(self.messages) < _MOST_REFUSED:
            self._refusal = RefusedMessage(error, b"")
        else:
            self.fault = MessageFault(Status.RESOURCE_EXHAUSTED, error.message)

    def _is_due(self, *, directly: bool = False) -> bool:
        """Whether a message gets its memory now: it is large, and `choose_buffer` is set, or will not be.

        What arrives together with the headers of a call is read before the call exists that sets it.
        """
        soon = self.choose_buffer is not None or (directly and not self.choice_follows)
        enough = MESSAGE_START_BYTE_SIZE if soon else _MAX_GATHERED_BYTE_SIZE
        return self._length >= RECEIVE_BUFFER_BYTE_SIZE and len(self._gathered) >= enough

    def _allocate(self) -> None:
        """Give a large message memory, now that its first bytes are known."""
        gathered = self._gathered
        start = b"" if self._compressed else bytes(gathered[:MESSAGE_START_BYTE_SIZE])
        taken = len(gathered)
        try:
            if self.choose_buffer is None:
                self._large = memoryview(mmap.mmap(-1, self._length))
            else:
                self._large = self.choose_buffer(start, self._length)
            self._large[:taken] = gathered
        except ServingError as error:
            self._refusal = RefusedMessage(error, start)
        except OSError:
            self.fault = MessageFault(Status.RESOURCE_EXHAUSTED, f"no memory for a message of {self._length} bytes")
            return
        gathered.clear()
        self.received_directly(taken)

    def _take_content(self, data: memoryview) -> int:
        if self._large is None and self._refusal is None and self._is_due():
            self._allocate()
            if self.fault is not None:
                return 0
        if self._refusal is not None:
            taken = min(self._length - self._filled, len(data))
            self.received_directly(taken)
            return taken
        if self._large is not None:
            taken = min(self._length - self._filled, len(data))
            self._large[self._filled : self._filled + taken] = data[:taken]
            self.received_directly(taken)
            return taken
        taken = min(self._length - len(self._gathered), len(data))
        self._gathered += data[:taken]
        if len(self._gathered) == self._length:
            message, self._gathered = self._gathered, bytearray()
            self._complete(message)
        return taken

    def _complete(self, message: Buffer) -> None:
        self._large = None
        self._length = -1
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            self.add(refusal)
        elif not self._compressed:
            self.add(message)
        else:
            inflated = self._inflate(message)
            if inflated is not None:
                self.add(inflated)

    def _inflate(self, message: Buffer) -> bytes | CompressedMessage | None:
        """Return the content of a compressed message, or the message if it is large. None where that is a fault."""
        try:
            inflated = inflate(message, self._encoding, min(LOOP_BYTE_SIZE, self.max_byte_size))
        except InflatedTooLarge as error:
            if self.max_byte_size > LOOP_BYTE_SIZE:
                return CompressedMessage(message, self._encoding)
            self.fault = MessageFault(Status.RESOURCE_EXHAUSTED, str(error))
            return None
        if inflated is None:
            self.fault = MessageFault(Status.INTERNAL, broken_compression(self._encoding))
        return inflated

    def _refuse_size(self, length: int, limit: int) -> None:
        self.fault = MessageFault(Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {limit})")


def _kept_byte_size(message: ReceivedMessage) -> int:
    """Return what a message that waits counts, beside memory of its own."""
    if isinstance(message, CompressedMessage):
        message = message.content
    if isinstance(message, (bytes, bytearray)):
        return len(message) + _MESSAGE_BYTE_SIZE
    return _MESSAGE_BYTE_SIZE
