"""The body of an inference request that comes in parts: in memory of its model, or in a buffer that grows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ArenaFull
from protocols.body_sizes import RECEIVE_BUFFER_BYTE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.memory.receive_buffer import ReceiveBuffer
    from protocols.http.fast.call import FastCall
    from protocols.http.fast.connection import FastConnection
    from protocols.iteration_budget import IterationBudget

#: A buffer grows to `_GROWTH` times the bytes that have come, at least to `_LEAST_BYTE_SIZE`: memory is not taken for
#: an announced size alone, and a body is not copied too often.
_GROWTH = 8
_LEAST_BYTE_SIZE = 64 << 10


class IncomingBody(msgspec.Struct, eq=False):
    """Collects `byte_size` bytes for `call`."""

    call: FastCall
    byte_size: int
    #: Memory of the model, with room for all of the body.
    receive_buffer: ReceiveBuffer | None = None
    #: Returns what was reserved for a body without such memory; None where nothing was.
    end_reservation: Callable[[], None] | None = None
    #: There is no memory: the body is read and forgotten.
    no_memory: bool = False
    #: How many bytes have come; the buffer may be larger until the last has.
    received: int = 0
    _buffer: bytearray = msgspec.field(default_factory=bytearray)

    @property
    def body(self) -> bytearray | memoryview:
        """What has come, once all of it has."""
        return self._buffer if self.receive_buffer is None else self.receive_buffer.view

    def room(self) -> memoryview:
        """Return where in `receive_buffer` the next bytes may be received to, which `received` then counts."""
        assert self.receive_buffer is not None, "the body has no memory of its model"
        return self.receive_buffer.view[self.received :]

    def add(self, part: bytes) -> None:
        """Take the next bytes, never more than are missing."""
        end = self.received + len(part)
        if self.receive_buffer is not None:
            self.receive_buffer.view[self.received : end] = part
        elif not self.no_memory:
            try:
                self._grow(end)
                self._buffer[self.received : end] = part
            except MemoryError:
                self.no_memory, self._buffer = True, bytearray()
        self.received = end

    def start_call(self) -> None:
        """All of the body has come: start the call, and give the receive buffer back to the kernel."""
        if self.no_memory:
            self.call.refuse(ArenaFull(self.byte_size, "message"))
        else:
            self.call.start(self.body, self.receive_buffer)
        self.release()

    def release(self) -> None:
        """Give the receive buffer, or what was reserved, back."""
        if self.receive_buffer is not None:
            self.receive_buffer.release()
        end_reservation, self.end_reservation = self.end_reservation, None
        if end_reservation is not None:
            end_reservation()

    def _grow(self, end: int) -> None:
        if end > len(self._buffer):
            grown = bytearray(min(self.byte_size, max(end * _GROWTH, _LEAST_BYTE_SIZE)))
            grown[: self.received] = memoryview(self._buffer)[: self.received]
            self._buffer = grown


def incoming_body(call: FastCall) -> IncomingBody:
    """Return the body of `call` before its first byte, with the memory for it, which counts in the server's budget."""
    head, kernel = call.head, call.inference.kernel
    incoming = IncomingBody(call, head.body_byte_size)
    if head.body_byte_size >= RECEIVE_BUFFER_BYTE_SIZE:
        incoming.receive_buffer = kernel.receive_buffer(head.model, head.body_byte_size, head.header_length)
        if incoming.receive_buffer is None:
            incoming.end_reservation = kernel.reserve(head.body_byte_size)
            incoming.no_memory = incoming.end_reservation is None
    return incoming


class BodyReceiver(asyncio.BufferedProtocol):
    """The protocol of the transport until all of `incoming` has come: bytes are received where they belong, uncopied.

    At other times the transport has a plain protocol, which costs small requests less.
    """

    def __init__(
        self, connection: FastConnection, incoming: IncomingBody, transport: asyncio.Transport, budget: IterationBudget
    ) -> None:
        """`incoming` has a receive buffer, and is not complete."""
        self._connection = connection
        self._incoming = incoming
        self._transport = transport
        self._budget = budget

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming.room()[: self._budget.room]

    def buffer_updated(self, byte_size: int) -> None:
        budget, loop = self._budget, asyncio.get_running_loop()
        if budget.is_fresh:
            loop.call_soon(budget.reset)
        pauses = budget.moved(byte_size) and self._incoming.received + byte_size < self._incoming.byte_size
        self._connection.body_received(self._incoming, byte_size)
        if pauses:
            self._transport.pause_reading()
            loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """Receive more in the next event-loop iteration."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
