"""A connection of the HTTP port: which of its messages the lane answers itself, and which aiohttp does.

Messages are taken one after the other. Those of inference become a `FastCall`; other plain ones are given,
byte for byte, to an aiohttp connection that is a guest on the same transport, and the next message waits for
its answer. At the first message that is not plain aiohttp gets the transport for good.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import TYPE_CHECKING, cast

from protocols.http.fast.body_receiver import PlaceReceiver, Upload
from protocols.http.fast.call import FastCall
from protocols.http.fast.request_head import END, Head, InferHead, can_become_head
from protocols.http.fast.response_bytes import error_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.model import Model
    from protocols.http.aiohttp_internals import AiohttpConnection
    from protocols.http.fast.fast_path import FastPath
    from protocols.http.fast.known_heads import KnownHead, Target
    from protocols.http.fast.prepared import RequestBody
    from protocols.http.fast.response_bytes import ResponseBytes

#: Requests of one connection that may wait for their answers; then nothing more is read.
MAX_OUTSTANDING = 32

#: Bodies from this size on are received into memory of their model.
_IN_PLACE_BYTE_SIZE = 64 << 10

#: Messages that one connection may begin before others have their turn.
_MESSAGES_PER_TURN = 32


class FastConnection(asyncio.Protocol):
    """Made by a `FastPath`, which calls `expire` now and then."""

    def __init__(self, lane: FastPath) -> None:
        self._lane = lane
        self._transport: asyncio.Transport
        #: Bytes that have come and are of no message yet that was begun.
        self._received = b""
        #: Bytes that the message lacks which was begun last, and where they go: there, or to the guest.
        self._missing = 0
        self._upload: Upload | None = None
        #: The last head; clients repeat them.
        self._known: KnownHead | None = None
        #: Calls without an answer, or with one that has to wait for those before it.
        self._calls: deque[FastCall] = deque()
        self._guest: AiohttpConnection | None = None
        self._guest_busy = False
        self._taking = False
        #: A head has begun but not ended.
        self._head_begun = False
        #: No more messages are begun; the transport is closed when those that were have been answered.
        self._draining = False
        #: Nothing is taken any more: the transport is closed, or is about to be, or belongs to aiohttp.
        self._closing = False
        self._write_paused = False
        #: Times of the lane's clock: of the last bytes either way, and of the begin of a head or a body.
        self._active_s = self._begin_s = 0.0
        #: Bytes that the transport had to write at the last look.
        self._unsent = 0
        #: What is to be called when the transport has nothing left to write.
        self._written: list[Callable[[], None]] = []

    # ---- called by the transport -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Then writing is paused as long as anything is left to write, and what was written can be given back.
        # Transports with TLS pause when the limit is reached, others behind it.
        encrypted = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(1 if encrypted else 0)
        self._lane.add(self)
        self._active_s = self._lane.now

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._lane.remove(self)
        calls, self._calls = self._calls, deque()
        for call in calls:
            call.cancel()
        if self._upload is not None and self._upload.place is not None:
            self._upload.place.release()
        self._release()
        if self._guest is not None:
            self._guest.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has come: in one step where it is what the usual clients send, otherwise message by message."""
        if self._closing:
            return
        lane = self._lane
        self._active_s = lane.now
        upload = self._upload
        if upload is not None:
            if len(data) == self._missing == upload.byte_size and upload.place is None:  # all of a body
                self._upload, self._missing = None, 0
                call = FastCall(lane, upload.head, self)
                self._calls.append(call)
                call.start(upload.model, data)
                return
        elif (
            (known := self._known) is not None
            and (target := known.target) is not None
            and not (self._received or self._missing or self._write_paused or self._draining)
            and len(self._calls) < MAX_OUTSTANDING
            and data.startswith(known.text)
            and known.generation == lane.kernel.catalog.generation
        ):
            head_end = len(known.text)
            if len(data) - head_end == known.body_byte_size:  # all of a request, its head that of the one before
                call = FastCall(lane, target.infer, self)
                self._calls.append(call)
                call.start(target.model, data[head_end:])
                return
            if len(data) == head_end and known.body_byte_size < _IN_PLACE_BYTE_SIZE:  # such a head alone
                self._missing, self._begin_s = known.body_byte_size, lane.now
                self._upload = Upload(target.infer, target.model, known.body_byte_size)
                return
        self._received = self._received + data if self._received else data
        self._take_messages()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._active_s, self._unsent = self._lane.now, self._transport.get_write_buffer_size()
        if self._guest is not None:
            self._guest.pause_writing()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._active_s = self._lane.now
        self._release()
        if self._guest is not None:
            self._guest.resume_writing()
        self._take_messages()

    # ---- called by the lane ------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request is being received or answered."""
        return bool(self._calls) or self._guest_busy or self._upload is not None

    def close_when_idle(self) -> None:
        """Begin no more messages, answer those that were begun, and close."""
        self._draining = True
        if not self.busy:
            self._close()

    def abort(self) -> None:
        self._transport.abort()

    def expire(self) -> None:
        """End the connection where the client has kept it waiting for too long."""
        lane = self._lane
        waited_s = lane.now - self._active_s
        if self._write_paused:
            unsent = self._transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._active_s, self._unsent = lane.now, unsent
            elif waited_s >= lane.times.send_s:
                self._transport.abort()
        elif self._calls or self._guest_busy:
            return
        elif self._upload is not None:
            slowest_s = lane.times.body_s + self._upload.received / lane.times.bytes_per_s
            if waited_s >= lane.times.body_s or lane.now - self._begin_s >= slowest_s:
                self._transport.write(error_reply(408, "Request Timeout", plain=True).last().head)
                self._close()
        elif self._missing:
            return  # the guest has answered, and gives the rest of the body its own time
        elif self._head_begun:
            if lane.now - self._begin_s >= lane.times.head_s:
                self._close()
        elif waited_s >= lane.times.idle_s:
            self._close()

    def _close(self) -> None:
        self._closing = True
        self._transport.close()

    # ---- messages that come ------------------------------------------------------------------

    def _take_messages(self) -> None:
        """Take what has been received as far as that is possible now, and read more where all of it was."""
        if self._taking or self._closing:
            return
        self._taking = True
        try:
            for _ in range(_MESSAGES_PER_TURN):
                if self._closing or not self._received or not self._take():
                    break
            else:
                asyncio.get_running_loop().call_soon(self._take_messages)
        finally:
            self._taking = False
        self._read_on(not self._received or self._head_begun)

    def _read_on(self, wanted: bool) -> None:
        transport = self._transport
        if transport.is_closing() or wanted is transport.is_reading():
            return
        if wanted:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def _take(self) -> bool:
        """Take one step. Returns False where the rest has to wait."""
        if self._missing:
            self._take_body()
            return True
        if self._draining or self._guest_busy or self._write_paused or len(self._calls) >= MAX_OUTSTANDING:
            return False
        end = self._received.find(END) + len(END)
        if end < len(END):
            return self._wait_for_head()
        self._head_begun = False
        text = self._received[:end]
        known = self._known
        if known is None or text != known.text or known.generation != self._lane.kernel.catalog.generation:
            known = self._known = self._lane.heads.look_at(text)
        if known.head is None:
            return self._hand_over()
        if known.target is None:
            return self._begin_guest_message(end, known.head)
        self._begin_call(end, known.body_byte_size, known.target)
        return True

    def _take_body(self) -> None:
        part, self._received = self._received[: self._missing], self._received[self._missing :]
        self._missing -= len(part)
        if self._upload is None:
            self._give_to_guest(part)
            return
        self._upload.add(part)
        if not self._missing:
            self._end_upload(self._upload)

    def _end_upload(self, upload: Upload) -> None:
        """All of a body has come."""
        self._upload = None
        if upload.place is not None:
            self._transport.set_protocol(self)
        self._start(upload.head, upload.model, upload.body, upload.place)
        if upload.place is not None:
            upload.place.release()

    def _wait_for_head(self) -> bool:
        if not can_become_head(self._received):
            return self._hand_over()
        if not self._head_begun:
            self._head_begun, self._begin_s = True, self._lane.now
        return False

    # ---- messages that the lane answers ------------------------------------------------------

    def _begin_call(self, start: int, byte_size: int, target: Target) -> None:
        end = start + byte_size
        head, model = target.infer, target.model
        body, self._received = self._received[start:end], self._received[end:]
        if len(body) == byte_size:
            self._start(head, model, body)
            return
        place = None
        if byte_size >= _IN_PLACE_BYTE_SIZE:
            place = self._lane.kernel.receive_buffer(model, byte_size, head.header_length)
        self._upload = Upload(head, model, byte_size, place)
        self._upload.add(body)
        self._missing = byte_size - len(body)
        self._begin_s = self._lane.now
        if place is not None:
            self._transport.set_protocol(PlaceReceiver(self, self._upload))

    def placed(self, upload: Upload, byte_size: int) -> None:
        """The next bytes of `upload` have been received where they belong."""
        self._active_s = self._lane.now
        upload.received += byte_size
        self._missing -= byte_size
        if not self._missing:
            self._end_upload(upload)

    def _start(self, head: InferHead, model: Model, body: RequestBody, place: ReceiveBuffer | None = None) -> None:
        call = FastCall(self._lane, head, self)
        self._calls.append(call)
        call.start(model, body, place)

    def answered(self) -> None:
        """Write the answers that are there, in the order of the requests. One of the calls has got its own."""
        calls = self._calls
        if len(calls) == 1 and (reply := calls[0].reply) is not None and not (reply.parts or self._draining):
            # As below, for the answer to the only request of a connection.
            calls.popleft()
            self._active_s = self._lane.now
            self._transport.write(reply.head)
            if self._received:
                self._take_messages()
            return
        replies = []
        while calls and (reply := calls[0].reply) is not None:
            replies.append(reply)
            calls.popleft()
        if not replies:
            return
        self._active_s = self._lane.now
        if self._draining and not self.busy:
            replies[-1] = replies[-1].last()
        self._write(replies)
        if self._draining and not self.busy:
            self._close()
        elif self._received:
            self._take_messages()

    def _write(self, replies: list[ResponseBytes]) -> None:
        if len(replies) == 1 and not replies[0].parts:
            self._transport.write(replies[0].head)
            return
        self._transport.writelines([piece for reply in replies for piece in (reply.head, *reply.parts)])
        self._written += [reply.release for reply in replies if reply.release is not None]
        if self._written and not self._transport.get_write_buffer_size():
            self._release()

    def _release(self) -> None:
        """Give back what was written: the transport keeps nothing of it any more."""
        written, self._written = self._written, []
        for release in written:
            release()

    # ---- messages that aiohttp answers -------------------------------------------------------

    def _begin_guest_message(self, head_end: int, head: Head) -> bool:
        if self._calls:
            return False  # their answers go first
        if self._guest is None:
            self._guest = self._lane.aiohttp_server.guest(self._guest_answered)
            self._guest.connection_made(self._transport)
        self._guest_busy = True
        self._missing = head.content_length
        part, self._received = self._received[:head_end], self._received[head_end:]
        self._give_to_guest(part)
        return True

    def _give_to_guest(self, part: bytes) -> None:
        assert self._guest is not None, "no message was begun for aiohttp"
        self._guest.data_received(part)

    def _guest_answered(self, stays_open: bool) -> None:
        self._guest_busy = False
        self._active_s = self._lane.now
        if not stays_open:
            self._closing = True  # by aiohttp itself
        elif self._draining:
            self._close()
        else:
            self._take_messages()

    def _hand_over(self) -> bool:
        """Leave the connection to aiohttp, as soon as the calls before have their answers."""
        if self._calls:
            return False
        self._closing = True
        self._lane.remove(self)
        if self._guest is not None:
            self._guest.leave_transport()
        received, self._received = self._received, b""
        self._read_on(True)
        connection = self._lane.aiohttp_server()
        self._transport.set_write_buffer_limits()  # as they were
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(received)
        return False
