"""A connection of the HTTP port: which of its messages the fast path serves itself, and which aiohttp does.

Messages are taken one after the other. Those of inference become a `FastCall`; other plain ones are given,
byte for byte, to an aiohttp connection that shares the transport, and the next message waits for its response.
At the first message that is not plain, aiohttp gets the transport permanently.

The file is long because it is one state machine: its short methods share the state of one connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, cast

from kernel.loop.iteration_end import IterationEnd
from protocols.access import Peer
from protocols.http.access_log import ConnectionAccessLog
from protocols.http.aiohttp_internals import SharedAiohttp
from protocols.http.client_limits import UnreadResponse
from protocols.http.fast.call import BodyReceiver, FastCall, IncomingBody, incoming_body
from protocols.http.fast.request_heads import END, HttpRequestHead, can_become_head
from protocols.http.fast.response_bytes import ResponseWriter, response_bytes
from protocols.http.responses import http_error
from protocols.request_limits import RECEIVE_BUFFER_BYTE_SIZE

if TYPE_CHECKING:
    from protocols.http.fast.fast_path import ConnectionMoves, FastPath
    from protocols.http.fast.request_heads import KnownRequestHead, Refusal
    from protocols.http.fast.response_bytes import ResponseBytes
    from protocols.http.inference.prepared import InferRequestHead

#: Requests of one connection that may wait for their responses; then nothing more is read.
MAX_OUTSTANDING = 32

#: Requests of all connections that may wait for their responses behind another one of their connection. A client that
#: sends one request at a time waits for no more than these, and one of each connection.
MAX_PIPELINED = 1024

#: After a read of this size a connection rests until the next event-loop iteration: its socket may have megabytes.
_LARGE_READ_BYTE_SIZE = 128 << 10

#: Messages of one connection that are taken of one read, before other connections have their turn.
MESSAGES_AT_ONCE = 32


class FastConnection(asyncio.Protocol):
    """Made by a `FastPath`, which calls `expire` now and then."""

    def __init__(self, fast_path: FastPath) -> None:
        self._fast_path = fast_path
        self._transport: asyncio.Transport
        self._iteration_end = IterationEnd.current()
        self.peer: Peer
        self._aiohttp: SharedAiohttp
        self._writer: ResponseWriter
        #: None where requests are not logged.
        self._access_log: ConnectionAccessLog | None = None
        #: Bytes that have come and belong to no message that was begun.
        self._received = b""
        #: Bytes that the last message lacks: they belong to `_incoming`, or else to aiohttp, unless the request was
        #: refused (`_discarding`).
        self._missing = 0
        self._incoming: IncomingBody | None = None
        self._discarding = False
        #: The last head; clients repeat them.
        self._known: KnownRequestHead | None = None
        #: Calls without a response, or with one that has to wait for those before it.
        self._calls: deque[FastCall] = deque()
        #: The last response, which is written at the end of the event-loop iteration; None for none.
        self._unwritten: bytes | None = None
        #: How many of these the fast path has counted as behind another one, when the last request or response came.
        self._pipelined_count = 0
        #: A head has begun but not ended.
        self._head_begun = False
        #: No more messages are begun; the transport is closed when those that were have their responses.
        self._draining = False
        #: Nothing is taken any more: the transport is closed, or is about to be, or belongs to aiohttp.
        self._closing = False
        #: Nothing is read before the next event-loop iteration.
        self._resting = False
        #: More messages have come, which are taken in a later iteration.
        self._waits = False
        self._write_paused = self._taking = False
        #: Times of the fast path's clock: of the last bytes either way, and of the begin of a head or a body.
        self._active_s = self._begin_s = 0.0
        self._unread = UnreadResponse()
        #: How often the kernel has given the connection to a door, and whether the next inference request stays here.
        self.passes = 0
        self.stays = False

    # ---- called by the transport -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.peer = Peer(transport)
        self._aiohttp = SharedAiohttp(self._transport, self._aiohttp_responded)
        self._writer = ResponseWriter(self._transport, self._fast_path.budget, self._responses_written)
        self.choose_log()
        self._fast_path.add(self)
        self._active_s = self._fast_path.now_s

    def choose_log(self) -> None:
        """Log requests from now on, or no longer, as the fast path says."""
        access, verbose = self._fast_path.log_access, self._fast_path.log_verbose
        logs = access or verbose
        self._access_log = ConnectionAccessLog(self._transport, access=access, verbose=verbose) if logs else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._unwritten = None
        self._fast_path.remove(self)
        calls, self._calls = list(self._calls), deque()
        self._count_pipelined()
        for call in calls:
            call.cancel()
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.release()
            calls.append(incoming.call)
        self._writer.close()
        self._aiohttp.connection_lost(exc)
        if self._access_log is not None:
            for call in calls:
                self._access_log.client_gone(call)

    def data_received(self, data: bytes) -> None:
        """Take what has come: in one step where it is what the usual clients send, otherwise message by message."""
        if self._closing:
            return
        if self._unwritten is not None:
            self._write_last()
        fast_path = self._fast_path
        self._active_s = fast_path.now_s
        incoming = self._incoming
        if incoming is not None:
            if (  # all of a body
                len(data) == self._missing == incoming.byte_size
                and fast_path.messages.room
                and incoming.receive_buffer is None
                and incoming.refusal is None
            ):
                self._incoming, self._missing = None, 0
                call = incoming.call
                if call.begin_ns:
                    call.received_ns = monotonic_ns()
                self._calls.append(call)
                call.start(data)
                return
        elif (
            (known := self._known) is not None
            and (infer := known.infer) is not None
            and not (self._received or self._missing or self._write_paused or self._draining)
            and not (self._calls and self._has_enough)
            and data.startswith(known.text)
            and fast_path.messages.room
            and known.generation == fast_path.kernel.catalog.generation
        ):
            body_byte_size = len(data) - len(known.text)
            whole = body_byte_size == infer.body_byte_size
            if whole or (not body_byte_size and infer.body_byte_size < RECEIVE_BUFFER_BYTE_SIZE):
                call = FastCall(fast_path.inference, infer, self)
                if self._access_log is not None:
                    self._access_log.begun(call)
                elif fast_path.kernel.takes_times:
                    call.begin_ns = monotonic_ns()
                if whole:  # all of a request, with the same head as the one before
                    self._calls.append(call)
                    call.start(data[len(known.text) :])
                else:  # such a head alone
                    byte_size, memory = infer.body_byte_size, fast_path.kernel.budget
                    self._missing, self._begin_s = byte_size, self._active_s
                    if memory.used_byte_size + byte_size <= memory.limit_byte_size:  # as `IncomingBody.count`
                        memory.used_byte_size += byte_size
                        self._incoming = IncomingBody(call, byte_size, counted=byte_size)
                    else:
                        self._incoming = incoming = incoming_body(call)
                        self._transport.set_protocol(BodyReceiver(self, incoming, self._transport, fast_path.budget))
                return
        self._received = self._received + data if self._received else data
        if len(data) >= _LARGE_READ_BYTE_SIZE and not self._resting:
            self._resting = True
            asyncio.get_running_loop().call_soon(self._end_rest)
        self._take_messages()

    def _end_rest(self) -> None:
        """Another event-loop iteration has begun: read on."""
        self._resting = False
        if not self._closing:
            self._read_on(not self._received or self._head_begun)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._unread.waited_s(self._fast_path.now_s, self._writer.unsent_byte_size)
        self._aiohttp.pause_writing()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._active_s = self._fast_path.now_s
        self._writer.resume()  # which may pause writing again
        self._unread.waited_s(self._active_s, self._writer.unsent_byte_size)
        self._write_paused = self._write_paused or self._writer.busy
        if not self._write_paused:
            self._aiohttp.resume_writing()
            self._take_messages()

    def _responses_written(self) -> None:
        """The transport was given all of large responses: go on as soon as it has nothing left to write."""
        if self._draining and not self.busy:
            self._close()
        elif not self._transport.get_write_buffer_size():
            self.resume_writing()

    # ---- called by the fast path -------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request is being received, has no response yet, or has one that is being written."""
        return self._expects_response or self._writer.busy

    @property
    def _expects_response(self) -> bool:
        return bool(self._calls) or self._aiohttp.busy or self._incoming is not None

    @property
    def paused_transport(self) -> asyncio.Transport | None:
        """The transport, where requests wait for responses and nothing is read, so that no end would be noticed."""
        return self._transport if self._expects_response and not self._transport.is_reading() else None

    def close_when_idle(self) -> None:
        """Begin no more messages, respond to those that were begun, and close."""
        self._draining = True
        if not self.busy:
            self._close()

    def abort(self) -> None:
        self._transport.abort()

    def expire(self) -> None:
        """End the connection where the client has kept it waiting for too long."""
        now_s, timeouts = self._fast_path.now_s, self._fast_path.timeouts
        idle_s = now_s - self._active_s
        if self._write_paused:
            if self._unread.waited_s(now_s, self._writer.unsent_byte_size) >= timeouts.send_s:
                self._transport.abort()
        elif self._calls or self._aiohttp.busy:
            return
        elif self._incoming is not None:
            end_s = timeouts.body_end_s(self._begin_s, self._incoming.received)
            if idle_s >= timeouts.body_s or now_s >= end_s:
                self._give_up(self._incoming)
        elif self._discarding:
            if now_s - self._begin_s >= timeouts.unwanted_body_s:
                self._close()
        elif self._missing:
            return  # aiohttp has responded, and gives the rest of the body its own time
        elif self._head_begun:
            if now_s - self._begin_s >= timeouts.head_s:
                self._close()
        elif idle_s >= timeouts.idle_s:
            self._close()

    def _give_up(self, incoming: IncomingBody) -> None:
        """Respond to a request whose body does not come, and close."""
        timeout = http_error(408, "Request Timeout", plain=True)
        response = response_bytes(timeout, incoming.call.head.response_headers).last()
        self._transport.write(response.head)
        if self._access_log is not None:
            self._access_log.responded(incoming.call, response)
        self._incoming = None
        self._transport.set_protocol(self)  # nothing is received into memory of the model any more
        incoming.release()
        self._close()

    def _close(self) -> None:
        self._closing = True
        self._write_last()
        self._transport.close()

    # ---- messages that come ------------------------------------------------------------------

    def _take_messages(self) -> None:
        """Take what has been received as far as that is possible now, and read more where all of it was."""
        if self._taking or self._closing:
            return
        self._taking = True
        messages = self._fast_path.messages
        taken, room = 0, messages.room
        try:
            while taken < room and self._received and self._take() and not self._closing:
                taken += 1
                if not messages.room:  # the last one took long
                    room = taken
        finally:
            self._taking = False
        if taken > 1:
            messages.handled(taken)
        if taken >= room and self._received and not self._waits:
            self._waits = True
            messages.wait(self._take_more)
        self._read_on(not self._received or self._head_begun)

    def _take_more(self) -> None:
        """Take messages that have waited for this iteration."""
        self._waits = False
        self._take_messages()

    def _read_on(self, wanted: bool) -> None:
        transport = self._transport
        wanted = wanted and not self._resting
        if transport.is_closing() or wanted is transport.is_reading():
            return
        if wanted:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def _take(self) -> bool:
        """Take one step. Returns False if the rest has to wait."""
        if self._missing:
            self._take_body()
            return True
        if self._draining or self._aiohttp.busy or self._write_paused or (self._calls and self._has_enough):
            return False
        end = self._received.find(END) + len(END)
        if end < len(END):
            return self._wait_for_head()
        self._head_begun = False
        text = self._received[:end]
        known = self._known
        if known is None or text != known.text or known.generation != self._fast_path.kernel.catalog.generation:
            known = self._known = self._fast_path.known_heads.find(text)
        moves = self._fast_path.moves
        if moves is not None:
            if moves.wanted(self, known):
                return self._move(moves)
            if not moves.remembers:
                self._known = None
        head = known.head
        if head is None or (head.closes and (known.infer is None or len(self._received) > end + head.content_length)):
            return self._hand_over()
        if known.infer is not None:
            self._draining = head.closes  # it is the last request
            self._begin_call(end, known.infer)
            return True
        if self._calls:
            return False  # their responses go first
        self._received = self._received[end:]
        self._missing = head.content_length
        if known.refusal is not None:
            self._refuse(head, known.refusal)
        else:
            self._aiohttp.begin(self._fast_path.aiohttp_server, text)
        return True

    @property
    def _has_enough(self) -> bool:
        """Whether the next request has to wait for a response to one before it."""
        self._count_pipelined()
        return (
            len(self._calls) >= MAX_OUTSTANDING
            or self._fast_path.pipelined_count >= MAX_PIPELINED
            or self._calls[-1].decoding is not None  # requests of a connection are submitted in their order
        )

    def _count_pipelined(self) -> None:
        count = max(0, len(self._calls) - 1)
        self._fast_path.pipelined_count += count - self._pipelined_count
        self._pipelined_count = count

    def _take_body(self) -> None:
        part, self._received = self._received[: self._missing], self._received[self._missing :]
        self._missing -= len(part)
        if self._incoming is not None:
            self._incoming.add(part)
            if not self._missing:
                self._end_body(self._incoming)
        elif self._discarding:
            self._discarding = self._missing > 0
        else:
            self._aiohttp.feed(part)

    def _wait_for_head(self) -> bool:
        if not can_become_head(self._received):
            return self._hand_over()
        if not self._head_begun:
            self._head_begun, self._begin_s = True, self._fast_path.now_s
        return False

    # ---- messages that the fast path serves --------------------------------------------------

    def _begin_call(self, start: int, infer: InferRequestHead) -> None:
        """Begin a request whose body begins at `start` of what was received."""
        call = FastCall(self._fast_path.inference, infer, self)
        if self._access_log is not None:
            self._access_log.begun(call)
        elif self._fast_path.kernel.takes_times:
            call.begin_ns = monotonic_ns()
        end = start + infer.body_byte_size
        body, self._received = self._received[start:end], self._received[end:]
        if len(body) == infer.body_byte_size:
            self._calls.append(call)
            call.start(body)
            return
        self._incoming = incoming = incoming_body(call)
        incoming.add(body)
        self._missing = infer.body_byte_size - len(body)
        self._begin_s = self._fast_path.now_s
        if not incoming.is_small:
            self._transport.set_protocol(BodyReceiver(self, incoming, self._transport, self._fast_path.budget))

    def body_received(self, incoming: IncomingBody, byte_size: int) -> None:
        """The next bytes of `incoming` have been received where they belong."""
        self._active_s = self._fast_path.now_s
        incoming.received += byte_size
        self._missing -= byte_size
        if not self._missing:
            self._end_body(incoming)

    def _end_body(self, incoming: IncomingBody) -> None:
        """All of a body has come."""
        self._incoming = None
        if not incoming.is_small:
            self._transport.set_protocol(self)
        self._calls.append(incoming.call)
        incoming.start_call()

    def _refuse(self, head: HttpRequestHead, refusal: Refusal) -> None:
        """Respond to a request that its head alone decided; its body is read and forgotten."""
        self._active_s = self._begin_s = self._fast_path.now_s
        self._discarding = self._missing > 0
        response = response_bytes(refusal.response, refusal.response_headers)
        self._transport.write(response.head)
        if self._access_log is not None:
            self._access_log.refused(head, response)

    def response_ready(self) -> None:
        """Write the responses that are there, in the order of the requests. One of the calls has got its own."""
        calls = self._calls
        if (
            len(calls) == 1
            and (response := calls[0].response) is not None
            and not (response.parts or self._draining or self._write_paused or self._access_log)
        ):
            # As below, for the response to the only request of a connection.
            call = calls.popleft()
            self._active_s = self._fast_path.now_s
            if self._iteration_end.joins_writes and not (self._received or call.begin_ns):
                self._unwritten = response.head
                self._iteration_end.add_write(self._write_last)
                return
            self._transport.write(response.head)
            if self._received:
                self._take_messages()
            return
        done: list[FastCall] = []
        responses: list[ResponseBytes] = []
        while calls and (response := calls[0].response) is not None:
            responses.append(response)
            done.append(calls.popleft())
        if not responses:
            return
        if self._pipelined_count:
            self._count_pipelined()
        self._active_s = self._fast_path.now_s
        if self._draining and not self._expects_response:
            responses[-1] = responses[-1].last()
        self._writer.write(
            [piece for each in responses for piece in (each.head, *each.parts)],
            sum(each.byte_size for each in responses),
            [each.release for each in responses if each.release is not None],
        )
        self._write_paused = self._write_paused or self._writer.busy
        if self._access_log is not None:
            for call, response in zip(done, responses, strict=True):
                self._access_log.responded(call, response)
        if self._draining and not self.busy:
            self._close()
        elif self._received:
            self._take_messages()

    def _write_last(self) -> None:
        """Write the response that waits for the end of the iteration, unless it was written before."""
        octets, self._unwritten = self._unwritten, None
        if octets is not None:
            self._transport.write(octets)

    def request_prepared(self) -> None:
        self._take_messages()

    # ---- messages that aiohttp serves --------------------------------------------------------

    def _aiohttp_responded(self, stays_open: bool) -> None:
        self._active_s = self._fast_path.now_s
        if not stays_open:
            self._closing = True  # by aiohttp itself
        elif self._draining:
            self._close()
        else:
            self._take_messages()

    def _hand_over(self) -> bool:
        """Leave the connection to aiohttp, as soon as the calls before have their responses."""
        moves = self._fast_path.moves
        if moves is not None and moves.wanted(self, None):
            return self._move(moves)
        if self._calls:
            return False
        self._closing = True
        self._fast_path.remove(self)
        self._aiohttp.leave_transport()
        received, self._received = self._received, b""
        self._resting = False  # aiohttp has a pause of its own
        self._read_on(True)
        connection = self._fast_path.aiohttp_server()
        self._transport.set_write_buffer_limits()  # as they were
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(received)
        return False

    # ---- messages that another process serves ------------------------------------------------

    def _move(self, moves: ConnectionMoves) -> bool:
        """Let another process serve the connection, as soon as the calls before have their responses."""
        self._write_last()
        if self._calls or self._writer.busy or self._transport.get_write_buffer_size():
            return False  # this follows again when a response is written
        if not moves.move(self, self._transport, self._received):
            if moves.serves_all:
                self.stays = True
                return True  # the message is served here
            self._transport.abort()
        # The transport is aborted, and says so to its protocol in a later iteration.
        self._received = b""
        self._closing = True
        self._fast_path.remove(self)
        self._aiohttp.leave_transport()
        self._resting = True  # nothing is read any more
        self._transport.set_protocol(asyncio.Protocol())
        return False
