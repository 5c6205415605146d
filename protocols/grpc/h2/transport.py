"""One HTTP/2 connection on a socket: its bytes to the receiving half, its events to calls, its frames to the socket.

What is sent in one event-loop iteration leaves in one write. A client that does not read its responses is not read
any further: its requests stay in the socket.

`LifetimeTimer` asks `limits.Lifetime` what is due, and pings, drains or closes the connection. It is one timer, which
is set again only when it has fired, so messages of the connection add no work.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from typing import TYPE_CHECKING, Protocol, cast

from kernel.loop.iteration_end import IterationEnd
from protocols.access import Peer
from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.frames import PING_REQUEST, H2ErrorCode
from protocols.grpc.h2.limits import FRAMES_PER_READ, LEAST_FRAMES_PER_READ, Lifetime, LifetimeAction
from protocols.grpc.h2.states import MAX_CONTROL_FRAME_BYTE_SIZE, StreamState
from protocols.grpc.h2.streams import StreamEvent
from protocols.loop_budgets import COUNTED_READ_BYTE_SIZE, IterationBudget, MessageBudget
from protocols.written_releases import WrittenReleases

if TYPE_CHECKING:
    from protocols.grpc.framing import MessageMemory
    from protocols.grpc.h2.limits import KeepaliveRules
    from protocols.grpc.h2.streams import Stream, StreamCallbacks

# Names of this module are found faster than members of an enum (states.py).
_OPENED, _READABLE, _COMPLETE = StreamEvent.OPENED, StreamEvent.READABLE, StreamEvent.COMPLETE

_DATA_SENT, _CLOSED_STREAM = StreamEvent.DATA_SENT, StreamState.CLOSED

#: How much is received at once; there must be room for any frame that is not DATA. For a large message in small frames
#: it is more, because a read costs more than the frames in it.
RECEIVE_BYTE_SIZE = max(64 * 2**10, 2 * MAX_CONTROL_FRAME_BYTE_SIZE)
_LARGE_RECEIVE_BYTE_SIZE = 256 * 2**10

#: If at least this much of a frame is missing, it is received directly to where it belongs. Less is received with what
#: follows, and copied, because a read costs more.
_LEAST_DIRECT_BYTE_SIZE = 32 * 2**10

#: How much output may wait for the socket before nothing more is read.
MAX_BACKLOG_BYTE_SIZE = 64 * 2**10

#: Output up to this size is joined, which costs a copy; pieces of more are written as they are.
_JOINED_BYTE_SIZE = 64 * 2**10

#: How long the socket may accept nothing before the connection is aborted.
WRITE_TIMEOUT_S = 30

#: After a connection error: how long what the peer still sends is read and dropped, so that it can read the GOAWAY.
LINGER_S = 1.0


class CallAcceptor(Protocol):
    """What a connection needs of the server that accepted it."""

    def connection_opened(self, connection: ServerConnection) -> None: ...

    def connection_closed(self, connection: ServerConnection) -> None: ...

    def accept_call(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        """Return what responds to a new stream, None if the response was sent already."""

    def connection_idle(self) -> None:
        """A connection has no calls left and has written all responses."""


class PassingAcceptor:
    """A `CallAcceptor` that passes everything on to another one, but for what a subclass does before."""

    def __init__(self, acceptor: CallAcceptor) -> None:
        self._acceptor = acceptor

    def connection_opened(self, connection: ServerConnection) -> None:
        self._acceptor.connection_opened(connection)

    def connection_closed(self, connection: ServerConnection) -> None:
        self._acceptor.connection_closed(connection)

    def accept_call(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        return self._acceptor.accept_call(connection, stream)

    def connection_idle(self) -> None:
        self._acceptor.connection_idle()


def message_budget() -> MessageBudget:
    """Return a budget of frames for the connections of a front door, on the running loop."""
    return MessageBudget(LEAST_FRAMES_PER_READ, FRAMES_PER_READ, asyncio.get_running_loop().call_soon)


class _SharedMemory(threading.local):
    """Memory of a thread for the bytes of one read.

    They are taken, or kept elsewhere, before the next read of any connection of the thread.
    """

    def __init__(self) -> None:
        self.large = memoryview(bytearray(_LARGE_RECEIVE_BYTE_SIZE))
        self.usual = self.large[:RECEIVE_BYTE_SIZE]


_shared = _SharedMemory()


class ServerConnection(asyncio.BufferedProtocol):
    """A client's connection. Calls respond on `sending` and then call `schedule_write`."""

    def __init__(
        self,
        acceptor: CallAcceptor,
        rules: KeepaliveRules | None = None,
        budget: IterationBudget | None = None,
        messages: MessageBudget | None = None,
        memory: MessageMemory | None = None,
    ) -> None:
        """Without `rules` the connection lives as long as its client wants, and is never pinged.

        `budget` is for large messages, `messages` for small ones, and in `memory` messages count that wait for their
        call; all of them are shared by all connections.
        """
        self._budget = budget or IterationBudget()
        self._messages = messages or message_budget()
        self.http2 = H2Connection(rules, memory)
        self.sending = self.http2.sending
        self.transport: asyncio.Transport
        #: The client.
        self.peer: Peer
        #: When the last bytes arrived.
        self.last_received_ns = time.monotonic_ns()
        self._streams = self.http2.streams
        self._receiving = self.http2.receiving
        self._stream_frames = self.http2.receiving.stream_frames
        self._acceptor = acceptor
        self._rules = rules
        self._timer: LifetimeTimer | None = None
        self._loop = asyncio.get_running_loop()
        self._iteration_end = IterationEnd.current()
        #: Messages that wait for a later iteration, because those before them took long.
        self._held: list[tuple[StreamEvent, Stream]] = []
        self._usual_memory, self._large_memory = _shared.usual, _shared.large
        #: What was received and not taken is between `_start` and `_end`: in memory of the connection's own, if a read
        #: has left something, else in the shared memory.
        self._memory = self._large_memory
        self._own_memory: memoryview | None = None
        self._start = 0
        self._end = 0
        #: Whether the transport was given another buffer than the memory: the buffer of a large message.
        self._receives_directly = False
        self._write_scheduled = False
        #: Whether the socket accepts no more, and since when that is known.
        self._write_paused = False
        self._write_paused_ns: int | None = None
        self._read_paused = False
        self._closing = False
        self._releases: WrittenReleases

    # ---- asyncio.BufferedProtocol -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.peer = Peer(transport)
        self._releases = WrittenReleases(self.transport)
        if self._rules is not None:
            self._timer = LifetimeTimer(self, self._rules)
        self._acceptor.connection_opened(self)
        self._write_output()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._start == self._end:
            self._start = self._end = 0
            direct = self._stream_frames.direct_buffer()
            if direct is not None and len(direct) >= _LEAST_DIRECT_BYTE_SIZE:
                self._receives_directly = True
                return direct[: self._budget.room]
            self._receives_directly = False
            self._memory = self._large_memory
            return self._usual_memory if direct is None else self._large_memory
        self._receives_directly = False
        return self._memory[self._end :]

    def buffer_updated(self, byte_size: int) -> None:
        """Handle what was received, as much as one event-loop iteration may, and write what that brought.

        A small request goes from here to the kernel in two more calls: every frame of the stack costs it time.
        """
        receiving = self._receiving
        self.last_received_ns = now_ns = time.monotonic_ns()
        self._write_scheduled = True  # it is done below, not in another iteration
        pauses = False
        if byte_size >= COUNTED_READ_BYTE_SIZE:
            if self._budget.is_fresh:
                self._loop.call_soon(self._budget.reset)
            pauses = self._budget.moved(byte_size)
        if self._receives_directly:
            self._stream_frames.received_directly(byte_size)
        else:
            self._end += byte_size
            self._start += receiving.receive(self._memory[self._start : self._end], now_ns, self._messages.room)
        self._dispatch_events()
        if self._start < self._end and (direct := self._stream_frames.direct_buffer()) is not None:
            self._copy_directly(direct)
        self._write_output()
        if pauses and not self._closing:
            self._set_reading(False)
            self._loop.call_soon(self._continue)
        elif receiving.has_more or self._held or self.sending.ended:
            # Reading pauses while other connections are served, so that the memory does not overflow.
            self._set_reading(False)
            if not self.sending.ended:
                self._messages.wait(self._continue)
        if self._start < self._end and not (receiving.has_more and self._memory is self._own_memory):
            self._keep_rest()

    def _keep_rest(self) -> None:
        """Keep what was received and not taken, at the start of memory of the connection's own."""
        rest = self._end - self._start
        own = self._own_memory
        if own is None or len(own) < rest:
            own = self._own_memory = memoryview(bytearray(max(rest, RECEIVE_BYTE_SIZE)))
        if self._start or self._memory is not own:
            own[:rest] = bytes(self._memory[self._start : self._end])
            self._memory, self._start, self._end = own, 0, rest

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused, self._write_paused_ns = False, None
        self._releases.run()
        self.schedule_write()

    def eof_received(self) -> bool:
        return False  # close: a client that sends no more does not wait for responses either

    def connection_lost(self, exc: BaseException | None) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.stop()
        self.sending.close()
        self._dispatch_events()
        self._releases.run()
        for release in self.sending.releases:
            release()
        self.sending.releases = []
        self._acceptor.connection_closed(self)

    # ---- input -------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Handle what was received before."""
        if not (self.sending.ended or self._closing):
            self._receives_directly = False
            if self._held:
                self._streams.events[:0], self._held = self._held, []
                self._dispatch_events()
                if self._held:
                    self._messages.wait(self._continue)
                    return
            self.buffer_updated(0)

    def _copy_directly(self, direct: memoryview) -> None:
        """Copy the start of a large message, which has arrived together with its request head, to where it belongs."""
        taken = min(len(direct), self._end - self._start)
        direct[:taken] = self._memory[self._start : self._start + taken]
        self._start += taken
        self._stream_frames.received_directly(taken)

    def _dispatch_events(self) -> None:
        """Have calls handle what happened to their streams."""
        streams, messages = self._streams, self._messages
        while streams.events:
            events, streams.events = streams.events, []
            if len(events) > 1:
                messages.handled(len(events))
            for event, stream in events:
                call = stream.call
                if event is _COMPLETE:
                    if not messages.room:
                        self._held.append((event, stream))
                    elif stream.state is not _CLOSED_STREAM:
                        call = stream.call = self._acceptor.accept_call(self, stream)
                        if call is not None:
                            call.complete(stream.complete_message)
                            stream.complete_message = None  # the request has copies of its small tensors
                elif event is _OPENED:
                    if stream.state is not _CLOSED_STREAM:
                        stream.call = self._acceptor.accept_call(self, stream)
                elif call is None:
                    continue
                elif event is _READABLE:
                    if not messages.room:
                        self._held.append((event, stream))
                    elif stream.state is not _CLOSED_STREAM:
                        call.readable()
                elif event is _DATA_SENT:
                    call.data_sent()
                else:
                    stream.call = None
                    call.closed()

    def _set_reading(self, wanted: bool) -> None:
        if self._closing or wanted is not self._read_paused:
            return
        self._read_paused = not wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def _update_reading(self) -> None:
        """Read unless received frames are not handled yet, or the client does not read its responses."""
        sending = self.sending
        backed_up = self._write_paused and sending.write_queue.byte_size > MAX_BACKLOG_BYTE_SIZE
        self._set_reading(not (backed_up or self._receiving.has_more or self._held or sending.ended))

    # ---- output ------------------------------------------------------------------------------

    def schedule_write(self) -> None:
        """Have the output written at the end of this event-loop iteration."""
        if not self._write_scheduled:
            self._write_scheduled = True
            self._iteration_end.add_write(self._write_output)

    def write_soon(self) -> None:
        """Have a response written: at the end of this event-loop iteration if others come with it, else at once."""
        if self._write_scheduled:
            return
        if self._iteration_end.joins_writes or self.sending.waiting:
            self._write_scheduled = True
            self._iteration_end.add_write(self._write_output)
        else:
            self._write_output()

    def _write_output(self) -> None:
        self._write_scheduled = False
        sending, queue = self.sending, self.sending.write_queue
        if self._closing or self._write_paused:
            self._update_reading()
            return
        has_more = bool(sending.waiting) and self._pump()
        if byte_size := queue.byte_size:
            output = queue.take()
            if byte_size > _JOINED_BYTE_SIZE:
                self.transport.writelines(output)
            else:
                self.transport.write(output[0] if len(output) == 1 else b"".join(output))
        if sending.releases:
            releases, sending.releases = sending.releases, []
            self._releases.add(releases)
        if self._streams.events:
            self._dispatch_events()
        if sending.ended:
            self._close_after_goaway()
        elif has_more and not self._write_paused:
            self.schedule_write()
        if not self._streams.by_id:
            self._acceptor.connection_idle()
        if self._read_paused:
            self._update_reading()

    def _pump(self) -> bool:
        """Put waiting data into the queue, as much as this iteration has room for; returns whether there is more."""
        budget, queue = self._budget, self.sending.write_queue
        before = queue.byte_size
        has_more = self.sending.pump(before + budget.room)
        if (byte_size := queue.byte_size - before) and budget.is_fresh:
            self._loop.call_soon(budget.reset)
        budget.moved(byte_size)
        return has_more

    # ---- the end -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no call runs and the socket got every response."""
        return not self._streams.by_id and (self._closing or not self.sending.write_queue.byte_size)

    def go_away(self) -> None:
        """Ask the client to start no more calls here; those that run continue."""
        self.sending.go_away()
        self._write_output()

    def drain(self) -> None:
        """Ask the client to start no more calls because the connection is too old, and close after the last call."""
        self._acceptor = DrainingAcceptor(self, self._acceptor)
        self.sending.go_away("max_age")
        self.ping()

    def ping(self) -> None:
        """Ask the client for an acknowledgement, so that it sends something."""
        self.sending.write_queue.put_control(PING_REQUEST)
        self._write_output()

    def terminate_calls(self) -> None:
        """End the calls that run, with a status for their clients."""
        for stream in tuple(self._streams.by_id.values()):
            if stream.call is not None:
                stream.call.terminate()
        self._write_output()

    def close(self) -> None:
        """Close when all output has been sent. Calls that run end without a response."""
        self.sending.fail(H2ErrorCode.NO_ERROR)
        self._dispatch_events()
        self._write_output()
        self._closing = True
        self.transport.close()

    def check_progress(self, now_ns: int) -> None:
        """End what has waited for the client too long. Called now and then."""
        self.http2.check_progress(now_ns)
        if self._write_paused:
            if self._write_paused_ns is None:
                self._write_paused_ns = now_ns
            elif now_ns - self._write_paused_ns >= WRITE_TIMEOUT_S * 10**9:
                self.transport.abort()
                return
        self._dispatch_events()
        self._write_output()

    def _close_after_goaway(self) -> None:
        """Close after a GOAWAY: what the peer still sends is dropped, so that it can read why."""
        if self._closing:
            return
        self._start = self._end = 0
        if self.transport.can_write_eof():  # TLS cannot end one direction
            with contextlib.suppress(OSError):
                self.transport.write_eof()
        self._set_reading(True)
        self._closing = True
        self._loop.call_later(LINGER_S, self.transport.abort)


#: How long the last frames may take to be written when a connection is closed.
_LAST_FRAMES_TIMEOUT_S = 1.0


class LifetimeTimer:
    """Runs from its construction to `stop`."""

    def __init__(self, connection: ServerConnection, rules: KeepaliveRules) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._lifetime = Lifetime(rules, time.monotonic_ns(), random.uniform(-1, 1))
        self._set()

    def stop(self) -> None:
        self._handle.cancel()

    def _set(self) -> None:
        delay_ns = self._lifetime.due_ns - time.monotonic_ns()
        self._handle = self._loop.call_later(max(delay_ns, 0) / 1e9, self._act)

    def _act(self) -> None:
        connection, parts = self._connection, self._connection.http2
        action = self._lifetime.next_action(
            time.monotonic_ns(),
            last_received_ns=connection.last_received_ns,
            has_calls=bool(parts.streams.by_id),
            sent_byte_size=parts.sending.write_queue.sent_byte_size,
        )
        if action is LifetimeAction.CLOSE:
            connection.close()
            self._loop.call_later(_LAST_FRAMES_TIMEOUT_S, connection.transport.abort)
            return
        if action is LifetimeAction.PING:
            connection.ping()
        elif action is LifetimeAction.DRAIN:
            connection.drain()
        self._set()


class DrainingAcceptor(PassingAcceptor):
    """Stands before the acceptor of a connection that is too old, and closes it when its last call has ended.

    A client may have started calls before it received the GOAWAY. Once it has acknowledged a ping that was sent
    behind the GOAWAY, none of them is on its way any more (RFC 9113, 6.8): later calls are refused.
    """

    def __init__(self, connection: ServerConnection, acceptor: CallAcceptor) -> None:
        super().__init__(acceptor)
        self._connection = connection
        self._receiving = connection.http2.receiving
        self._ping_ack_count = self._receiving.ping_ack_count
        self._closing = False

    def accept_call(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        if self._client_knows and stream.id > self._receiving.ping_ack_last_id:
            connection.sending.reset(stream, H2ErrorCode.REFUSED_STREAM)  # it may be made again elsewhere
            return None
        return self._acceptor.accept_call(connection, stream)

    def connection_idle(self) -> None:
        super().connection_idle()
        if self._client_knows and not self._closing:
            self._closing = True
            self._connection.close()

    @property
    def _client_knows(self) -> bool:
        """Whether the client has received the GOAWAY."""
        return self._receiving.ping_ack_count > self._ping_ack_count
