"""One HTTP/2 connection on a socket: bytes to the state machine, its events to calls, its output to the socket.

All that a loop turn has to say leaves in one write. A client that does not read gets no further: its
requests stay in the socket while its answers back up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING, Protocol, cast

from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.frames import PING_REQUEST, H2ErrorCode
from protocols.grpc.h2.lifetime import Draining, LifetimeTimer
from protocols.grpc.h2.states import MAX_HELD_BYTE_SIZE
from protocols.grpc.h2.streams import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocols.grpc.h2.keepalive import KeepaliveRules
    from protocols.grpc.h2.streams import Stream, StreamCallbacks

#: What is received at once, and must hold any frame but DATA.
RECEIVE_BYTE_SIZE = max(64 * 2**10, 2 * MAX_HELD_BYTE_SIZE)

#: How much output is given to the socket at once, and how much may wait for it before nothing more is read.
WRITE_BYTE_SIZE = 2**20
MAX_BACKLOG_BYTE_SIZE = 64 * 2**10

#: Output below is joined, at the price of a copy; above, its pieces are written as they are.
_JOINED_BYTE_SIZE = 64 * 2**10

#: How long the socket may take nothing before the connection is cut.
WRITE_TIMEOUT_S = 30

#: How long what a peer still sends is read and dropped, so that it can read why it was refused.
LINGER_S = 1.0


class CallAcceptor(Protocol):
    """What a connection needs of the server that accepted it."""

    def opened(self, connection: ServerConnection) -> None: ...

    def closed(self, connection: ServerConnection) -> None: ...

    def answer(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        """Return what answers a new stream, None where it was answered already."""

    def quiet(self) -> None:
        """A connection has no calls left and has written all its answers."""


class ServerConnection(asyncio.BufferedProtocol):
    """A client's connection. Calls answer on `machine` and then call `wake`."""

    def __init__(self, owner: CallAcceptor, rules: KeepaliveRules | None = None) -> None:
        """Without `rules` the connection lives as long as its client wants, and nobody asks for a sign of life."""
        self.machine = H2Connection(rules)
        self.transport: asyncio.Transport
        #: When the last byte came.
        self.received_ns = time.monotonic_ns()
        self._owner = owner
        self._rules = rules
        self._timer: LifetimeTimer | None = None
        self._loop = asyncio.get_running_loop()
        self._memory = memoryview(bytearray(RECEIVE_BYTE_SIZE))
        #: The part of the memory that was received and not taken.
        self._start = 0
        self._end = 0
        self._direct = False
        self._awake = False
        #: Whether the socket takes no more, since when that was seen, and whether reading has stopped.
        self._blocked = False
        self._blocked_ns: int | None = None
        self._unread = False
        self._closing = False
        #: What is to be called when the transport has nothing left to write.
        self._written: list[Callable[[], None]] = []

    # ---- asyncio.BufferedProtocol -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Then writing is paused as long as anything is left to write, and what was written can be given back.
        # Transports with TLS pause when the limit is reached, others behind it.
        encrypted = transport.get_extra_info("sslcontext") is not None
        self.transport.set_write_buffer_limits(1 if encrypted else 0)
        if self._rules is not None:
            self._timer = LifetimeTimer(self, self._rules)
        self._owner.opened(self)
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._start == self._end:
            self._start = self._end = 0
            direct = self.machine.direct_buffer()
            self._direct = direct is not None
            if direct is not None:
                return direct
        self._direct = False
        return self._memory[self._end :]

    def buffer_updated(self, byte_size: int) -> None:
        if self._direct:
            self.received_ns = time.monotonic_ns()
            self.machine.received_directly(byte_size)
            self._handle_events()
            self._flush()
        else:
            self._end += byte_size
            self._work()

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked, self._blocked_ns = False, None
        self._release()
        self.wake()

    def eof_received(self) -> bool:
        return False  # close: a client that sends no more does not wait for answers either

    def connection_lost(self, exc: BaseException | None) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.stop()
        self.machine.close()
        self._handle_events()
        self._written += self.machine.releases
        self._release()
        self._owner.closed(self)

    # ---- input -------------------------------------------------------------------------------

    def _work(self) -> None:
        """Take what was received, a turn's worth, and write what that brought."""
        machine = self.machine
        self._awake = True  # written below, not in another turn
        self.received_ns = now_ns = time.monotonic_ns()
        self._start += machine.receive(self._memory[self._start : self._end], now_ns)
        self._handle_events()
        if self._start < self._end and (direct := machine.direct_buffer()) is not None:
            self._take_directly(direct)
        self._awake = False
        self._flush()
        if machine.more or machine.failed:
            # Reading rests while others have their turn, so that the memory does not overflow.
            self._read(False)
            if not machine.failed:
                self._loop.call_soon(self._go_on)
        elif self._start < self._end and self._start:
            rest = self._end - self._start
            self._memory[:rest] = bytes(self._memory[self._start : self._end])
            self._start, self._end = 0, rest

    def _take_directly(self, direct: memoryview) -> None:
        """Copy the begin of a large message, which has come together with its head, to where it belongs."""
        taken = min(len(direct), self._end - self._start)
        direct[:taken] = self._memory[self._start : self._start + taken]
        self._start += taken
        self.machine.received_directly(taken)

    def _go_on(self) -> None:
        if self.machine.failed or self._closing:
            return
        self._work()
        if not self.machine.more:
            self._read_if_possible()

    def _handle_events(self) -> None:
        machine = self.machine
        while machine.events:
            events, machine.events = machine.events, []
            for event, stream in events:
                call = stream.call
                if event is Event.CALLED:
                    if stream.open:
                        call = stream.call = self._owner.answer(self, stream)
                        if call is not None:
                            call.readable()
                elif event is Event.OPENED:
                    if stream.open:
                        stream.call = self._owner.answer(self, stream)
                elif call is None:
                    continue
                elif event is Event.READABLE:
                    if stream.open:
                        call.readable()
                elif event is Event.SENT:
                    call.sent()
                else:
                    stream.call = None
                    call.closed()

    def _read(self, wanted: bool) -> None:
        if self._closing or wanted is not self._unread:
            return
        self._unread = not wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def _read_if_possible(self) -> None:
        backed_up = self._blocked and self.machine.outbox_byte_size > MAX_BACKLOG_BYTE_SIZE
        self._read(not backed_up)

    # ---- output ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have what was put out written at the end of this loop turn."""
        if not self._awake:
            self._awake = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._awake = False
        self._flush()
        if self._unread and not self.machine.more:
            self._read_if_possible()

    def _flush(self) -> None:
        machine = self.machine
        if self._closing or self._blocked:
            if self._blocked and machine.outbox_byte_size > MAX_BACKLOG_BYTE_SIZE:
                self._read(False)
            return
        more = bool(machine.waiting) and machine.pump(WRITE_BYTE_SIZE)
        if machine.outbox_byte_size:
            self._write()
        if machine.releases:
            self._written += machine.releases
            machine.releases = []
            if not self.transport.get_write_buffer_size():
                self._release()
        if machine.events:
            self._handle_events()
        if machine.failed:
            self._close()
        elif more and not self._blocked:
            self.wake()
        if not machine.streams:
            self._owner.quiet()

    def _write(self) -> None:
        machine = self.machine
        joined = machine.outbox_byte_size <= _JOINED_BYTE_SIZE
        output = machine.take_output()
        if joined:
            self.transport.write(output[0] if len(output) == 1 else b"".join(output))
        else:
            self.transport.writelines(output)

    def _release(self) -> None:
        """Give back what was written: the transport keeps nothing of it any more."""
        releases, self._written = self._written, []
        for release in releases:
            release()

    # ---- the end -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no call runs and every answer was given to the socket."""
        return not self.machine.streams and (self._closing or not self.machine.outbox_byte_size)

    def go_away(self) -> None:
        """Tell the client to start no more calls here; those that run go on."""
        self.machine.go_away()
        self._flush()

    def drain(self) -> None:
        """Tell the client the same because of the connection's age, and close behind the last call."""
        self._owner = Draining(self, self._owner)
        self.machine.go_away("max_age")
        self.ping()

    def ping(self) -> None:
        """Ask the client for a sign of life."""
        self.machine.put_control(PING_REQUEST)
        self._flush()

    def cut_off_calls(self) -> None:
        """End the calls that run; their clients are told so."""
        for stream in tuple(self.machine.streams.values()):
            if stream.call is not None:
                stream.call.cut_off()
        self._flush()

    def close(self) -> None:
        """Close when what was written has been sent. Calls end without a word."""
        self.machine.fail(H2ErrorCode.NO_ERROR)
        self._handle_events()
        self._flush()
        self._closing = True
        self.transport.close()

    def check_progress(self, now_ns: int) -> None:
        """Cut what has waited too long for its client. Called now and then."""
        self.machine.check_progress(now_ns)
        if self._blocked:
            if self._blocked_ns is None:
                self._blocked_ns = now_ns
            elif now_ns - self._blocked_ns >= WRITE_TIMEOUT_S * 10**9:
                self.transport.abort()
                return
        self._handle_events()
        self._flush()

    def _close(self) -> None:
        """Close after a failure: what the peer still sends is dropped, so that it gets to the GOAWAY."""
        if self._closing:
            return
        self._start = self._end = 0
        if self.transport.can_write_eof():  # TLS has no such half
            with contextlib.suppress(OSError):
                self.transport.write_eof()
        self._read(True)
        self._closing = True
        self._loop.call_later(LINGER_S, self.transport.abort)
