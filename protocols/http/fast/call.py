"""An inference request of the fast path: its response becomes bytes, without a task or a request of aiohttp.

Behind `FastCall` is its body where that comes in parts: the memory for it, and the protocol that receives into it.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from kernel.serving.response import Response
from protocols.http.fast.response_bytes import ResponseBytes, response_head
from protocols.http.inference.infer_call import HttpInferCall
from protocols.request_limits import COPIED_RESPONSE_BYTE_SIZE, RECEIVE_BUFFER_BYTE_SIZE

if TYPE_CHECKING:
    from kernel.memory.input_placement import ReceiveBuffer
    from protocols.http.fast.connection import FastConnection
    from protocols.http.responses import HttpResponse
    from protocols.loop_budgets import IterationBudget


class FastCall(HttpInferCall):
    """A call whose response its connection writes."""

    response: ResponseBytes | None = None

    def send(self, response: Response) -> None:
        decoded, waiter = self.decoded, self.waiter
        if (
            decoded is not None
            and (template := decoded.template) is not None
            and response.final
            and response.error is None
            and waiter is not None
            and self._only is None
        ):
            # Nearly every response goes this way, which does what `finish` does, without its calls.
            octets = template.fill_in(response, self.intake.now_s)
            if octets is not None:
                if response.leased:
                    response.release()
                self.response, self.request = ResponseBytes(octets), None
                waiter.response_ready()
                return
        HttpInferCall.send(self, response)

    def finish(self, response: HttpResponse) -> None:
        byte_size = sum(map(len, response.body))
        head = response_head(response, byte_size, self.head.response_headers)
        source = response.source
        if source is not None and byte_size >= COPIED_RESPONSE_BYTE_SIZE:
            self.response = ResponseBytes(head, response.body, source.release, response.status)
        else:
            self.response = ResponseBytes(b"".join((head, *response.body)), [], None, response.status)
            if source is not None:
                template = None if self.decoded is None or self._only is not None else self.decoded.template
                if template is not None and type(source) is Response:
                    template.remember(source, response.body, head, self.intake.now_s)
                source.release()
        self._left()

    def cancel(self) -> None:
        HttpInferCall.cancel(self)
        response, self.response = self.response, None
        if response is not None and response.release is not None:  # it has waited for the responses before it
            response.release()


#: Where bytes are received that are not read, of all connections.
_SCRATCH = memoryview(bytearray(256 << 10))


class IncomingBody(msgspec.Struct, eq=False):
    """Collects `byte_size` bytes for `call`: in memory that counts in the server's budget, or a small buffer."""

    call: FastCall
    byte_size: int
    #: Memory with room for all of the body.
    receive_buffer: ReceiveBuffer | None = None
    #: Why there is no memory: the body is read and forgotten.
    refusal: ServingError | None = None
    #: How many bytes have come.
    received: int = 0
    #: How many bytes of the small buffer count in the server's budget.
    counted: int = 0
    _buffer: bytearray = msgspec.field(default_factory=bytearray)

    @property
    def body(self) -> bytearray | memoryview:
        """What has come, once all of it has."""
        return self._buffer if self.receive_buffer is None else self.receive_buffer.view

    @property
    def is_small(self) -> bool:
        """Whether the body is collected by `add` alone."""
        return self.receive_buffer is None and self.refusal is None

    def count(self) -> None:
        """Count the small buffer in the server's budget, before its first byte, or refuse the body."""
        kernel = self.call.intake.kernel
        if kernel.budget.has_room(self.byte_size):
            self.counted = self.byte_size
            kernel.budget.add(self.byte_size)
        else:
            self.refusal = kernel.memory_refusals.full()

    def room(self) -> memoryview:
        """Return where the next bytes may be received to, which `received` then counts. Not for small bodies."""
        if self.receive_buffer is None:
            return _SCRATCH[: self.byte_size - self.received]
        return self.receive_buffer.view[self.received :]

    def add(self, part: bytes) -> None:
        """Take the next bytes, never more than are missing."""
        end = self.received + len(part)
        if self.receive_buffer is not None:
            self.receive_buffer.view[self.received : end] = part
        elif self.refusal is None:
            self._buffer += part
        self.received = end

    def start_call(self) -> None:
        """All of the body has come: start the call, and give the receive buffer back to the kernel."""
        if self.refusal is not None:
            self.call.refuse(self.refusal)
        else:
            if self.call.begin_ns:
                self.call.received_ns = monotonic_ns()
            self.call.start(self.body, self.receive_buffer)
        self.release()

    def release(self) -> None:
        """Give the memory back. A second call does nothing."""
        buffer, self.receive_buffer = self.receive_buffer, None
        if buffer is not None:
            buffer.release()
        if self.counted:
            self.call.intake.kernel.budget.remove(self.counted)
            self.counted = 0


def incoming_body(call: FastCall) -> IncomingBody:
    """Return the body of `call` before its first byte, with the memory for it, unless it is small.

    Where the model has no memory left for messages that are being received, it is memory for helpers.
    """
    head, kernel = call.head, call.intake.kernel
    incoming = IncomingBody(call, head.body_byte_size)
    if head.body_byte_size >= RECEIVE_BUFFER_BYTE_SIZE:
        try:
            buffer = kernel.receive_buffer(head.route, head.body_byte_size, head.header_length)
            incoming.receive_buffer = buffer or kernel.message_buffer(head.body_byte_size)
        except ServingError as error:
            incoming.refusal = error
    else:
        incoming.count()
    return incoming


class BodyReceiver(asyncio.BufferedProtocol):
    """The protocol of the transport until all of `incoming` has come: bytes are received where they belong, uncopied.

    At other times the transport has a plain protocol, which costs small requests less.
    """

    def __init__(
        self, connection: FastConnection, incoming: IncomingBody, transport: asyncio.Transport, budget: IterationBudget
    ) -> None:
        """`incoming` is not small, and not complete."""
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
