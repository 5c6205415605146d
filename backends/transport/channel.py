"""A framed Unix socket with descriptor passing. The kernel's end is on its event loop, the worker's end blocks.

A descriptor arrives with the first byte of its frame. So the code that handles a message with a descriptor takes the
next received one.

File descriptors in received messages (`socket.recv_fds` of Python 3.11 ignores its flags).

What a process that a model forks does with the connections of its worker: it leaves them to its parent.

Else a child that raises, or returns from `execute`, would go on as if it were the worker: it would respond to the
parent's requests, write into the parent's outbox, and end the connection when it ends.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec

from backends.transport.framing import (
    LENGTH,
    LENGTH_PLACE,
    MAX_KERNEL_FRAME,
    MAX_WORKER_FRAME,
    FrameReader,
    FrameTooLarge,
    frame,
)
from backends.transport.outbox import Outbox, OutboxReader
from backends.transport.texts import encodable
from backends.transport.wire import OutboxCreated, encoder
from kernel.loop.iteration_end import IterationEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.transport.outbox import Progress
    from backends.transport.wire import Message


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> array.array[int]:
    """Return the descriptors in the ancillary data that `recvmsg` has received. The caller owns them."""
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return fds


logger = logging.getLogger(__name__)

_READ_SIZE = 1 << 16

#: Bytes of one read on the event loop. A response without tensors has about 120, and takes 20 us.
_LOOP_READ_SIZE = 1 << 14

_MAX_FDS = 4

#: The longest description of a problem in characters: it can contain a text of the peer.
_MAX_PROBLEM = 1000

#: Stands for a descriptor that has come with a message, and for which this process had no number left.
_LOST = -1

# Numbers: an operation with a flag of the module makes an object, which takes a microsecond.
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)

_CTRUNC = int(socket.MSG_CTRUNC)

_DONTWAIT = int(socket.MSG_DONTWAIT)

_FD_SPACE = socket.CMSG_LEN(_MAX_FDS * array.array("i").itemsize)


class DescriptorLost(ValueError):
    """The descriptor of a message was lost: this process has none left."""


class LoopChannel:
    """The kernel's end. The messages of one event-loop iteration are sent in one write.

    `on_messages` gets the complete messages of each read. `on_closed` is called once: with None if the peer has closed
    the connection, otherwise with what went wrong. The channel owns the socket. An exception of `on_messages` ends the
    connection: messages may not be trusted, and none is left half handled.
    """

    def __init__(self, sock: socket.socket, on_messages: Callable[[list[bytes]], None],
                 on_closed: Callable[[str | None], None], max_frame: int = MAX_WORKER_FRAME) -> None:  # fmt: skip
        """`max_frame` is the most bytes that a message of the peer may have."""
        sock.setblocking(False)
        self._socket = sock
        self._on_messages = on_messages
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._iteration_end = IterationEnd.current()
        self._reader = FrameReader(max_frame)
        #: The messages of this event-loop iteration, framed.
        self._outbox = bytearray()
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._fds: deque[int] = deque()
        self._closed = False
        #: `written` waits for it: it is done when something was written.
        self._progress: asyncio.Future[None] | None = None
        #: The peer's outbox, if it has one.
        self._peer_outbox: OutboxReader | None = None
        #: Whether a message could not be handled: no later one is.
        self._dropped = False
        #: How many bytes of the peer's stream the socket has delivered, and how many were handled. More are handled
        #: than delivered when some were read from the peer's outbox.
        self._delivered = 0
        self._handled = 0
        self._loop.add_reader(sock.fileno(), self._read_once)

    # ---- sending -----------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send `message` at the end of this event-loop iteration. A closed channel drops it."""
        outbox = self._outbox
        start = len(outbox)
        if not start:
            self._iteration_end.add_send(self.flush)
        outbox += LENGTH_PLACE  # framed in place, see `backends.transport.framing`
        try:
            encoder.encode_into(message, outbox, -1)
        except UnicodeEncodeError:
            outbox[start + LENGTH.size :] = encoder.encode(encodable(message))
        except BaseException:
            del outbox[start:]  # a part of a message would spoil all later ones
            raise
        LENGTH.pack_into(outbox, start, len(outbox) - start - LENGTH.size)

    def send_with_fd(self, message: Message, fd: int) -> None:
        """Send `message` and a duplicate of `fd`, in order with the other messages."""
        if self._closed:
            return
        self.flush()
        self._unsent.append((memoryview(frame(encoder.encode(message))), os.dup(fd)))
        self._write()

    def flush(self) -> None:
        """Write the messages of this event-loop iteration now."""
        if not self._outbox or self._closed:
            self._outbox.clear()
            return
        data, self._outbox = self._outbox, bytearray()
        if self._unsent:
            self._unsent.append((memoryview(data), None))
            return
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return  # the reader sees the end too, and reports the cause
        if sent < len(data):
            self._unsent.append((memoryview(data)[sent:], None))
            self._loop.add_writer(self._socket.fileno(), self._write)

    def _write(self) -> None:
        """Write what the socket did not accept before."""
        try:
            while self._unsent:
                data, fd = self._unsent[0]
                if fd is None:
                    sent = self._socket.send(data)
                else:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
                    sent = self._socket.sendmsg([data], [rights])
                    os.close(fd)
                self._unsent.popleft()
                self._note_progress()
                if sent < len(data):
                    self._unsent.appendleft((data[sent:], None))
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._socket.fileno(), self._write)
            return
        except OSError:
            self._drop_unsent()
        self._loop.remove_writer(self._socket.fileno())

    async def written(self, byte_size: int) -> None:
        """Wait until at most `byte_size` bytes are unsent, or the channel is closed."""
        while not self._closed and len(self._outbox) + sum(len(data) for data, _ in self._unsent) > byte_size:
            self.flush()
            if self._unsent:
                self._progress = self._loop.create_future()
                await self._progress

    def _note_progress(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _drop_unsent(self) -> None:
        self._note_progress()
        for _, fd in self._unsent:
            if fd is not None:
                os.close(fd)
        self._unsent.clear()

    # ---- receiving ---------------------------------------------------------------------------

    def take_fd(self) -> int:
        """Return the descriptor of the message that is being handled; the caller owns it.

        Raises ValueError for a message without one, and `DescriptorLost`.
        """
        if not self._fds:
            raise ValueError("a message without its file descriptor")
        fd = self._fds.popleft()
        if fd == _LOST:
            raise DescriptorLost("no file descriptor is left for one that came with a message")
        return fd

    def pause(self) -> None:
        """Read nothing until `resume`, also not that the peer has closed the connection."""
        if not self._closed:
            self._loop.remove_reader(self._socket.fileno())

    def resume(self) -> None:
        """Read again after `pause`."""
        if not self._closed:
            self._loop.add_reader(self._socket.fileno(), self._read_once)

    def go_on(self, handle: Callable[[list[bytes]], None]) -> None:
        """Let `handle` go on with messages that `on_messages` has kept; it gets no new ones.

        An exception of it ends the connection, as one of `on_messages`. Works also after `close`.
        """
        self._handle(b"", handle)

    def read_rest(self, more: Callable[[], bool] = lambda: True) -> None:
        """Handle the messages that a dead worker sent before it died, one read after another while `more`."""
        while more() and self._read_once():
            pass

    def _read_once(self) -> bool:
        """Read once and handle the messages. Returns False if there is nothing to read."""
        if self._closed:
            return False
        try:
            # A large message is read in few reads, each of which is handled within a fraction of a millisecond.
            byte_size = max(self._reader.wanted, _LOOP_READ_SIZE) if self._reader.wanted else _LOOP_READ_SIZE
            data, ancillary, flags, _ = self._socket.recvmsg(byte_size, _FD_SPACE, _CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionResetError:  # the peer has died with unread messages
            data, ancillary, flags = b"", [], 0
        except OSError as error:
            self._end(f"its connection failed: {error.strerror}")
            return False
        if ancillary:
            self._fds.extend(descriptors_in(ancillary))
        if flags & _CTRUNC:
            self._fds.append(_LOST)  # so that later messages get their own
        if not data:
            self._end(None)
            return False
        already_handled = self._handled - self._delivered
        self._delivered += len(data)
        return self._handle(data[already_handled:] if already_handled else data)

    def attach_outbox(self, fd: int) -> None:
        """Use the peer's outbox in the memory of `fd`. Raises ValueError for other memory. The caller closes `fd`."""
        if self._peer_outbox is not None:
            raise ValueError("a second outbox")
        self._peer_outbox = OutboxReader(fd)

    def detach_outbox(self) -> None:
        """Stop using the peer's outbox: the peer is dead, and its progress is no longer needed."""
        outbox, self._peer_outbox = self._peer_outbox, None
        if outbox is not None:
            outbox.close()

    def progress(self) -> Progress | None:
        """Return how far the peer is with its batches, or None if it has no outbox. Works also after `close`."""
        return None if self._peer_outbox is None else self._peer_outbox.progress()

    @property
    def incomplete_since(self) -> int | None:
        """The position in the stream of a message of which a part was received; None if there is none."""
        byte_size = self._reader.incomplete_byte_size
        return self._handled - byte_size if byte_size else None

    def take_unsent(self) -> None:
        """Handle the messages in the peer's outbox: the peer is busy, or dead. Works also after `close`."""
        if not self._dropped and self._peer_outbox is not None and (data := self._peer_outbox.unsent(self._handled)):
            self._handle(data)

    def _handle(self, data: bytes, handle: Callable[[list[bytes]], None] | None = None) -> bool:
        """Handle the next bytes of the stream. Returns False if they contain a message that cannot be handled."""
        self._handled += len(data)
        try:
            messages = self._reader.feed(data)
            self._iteration_end.joins_writes = len(messages) > 1
            (handle or self._on_messages)(messages)
            if self._fds and len(self._fds) > _MAX_FDS:
                raise ValueError(f"{len(self._fds)} file descriptors without their messages")
        except (ValueError, msgspec.DecodeError) as error:
            self.drop(f"it sent an invalid message: {str(error)[:_MAX_PROBLEM]}")
            return False
        except Exception as error:
            logger.exception("a message of a worker could not be handled")
            self.drop(f"a message of it could not be handled: {type(error).__name__}: {str(error)[:_MAX_PROBLEM]}")
            return False
        finally:
            self._iteration_end.joins_writes = False
        return True

    def drop(self, problem: str) -> None:
        """Close the connection because of `problem`, and handle nothing more that the peer has sent."""
        self._dropped = True
        self._end(problem)

    def _end(self, problem: str | None) -> None:
        if not self._closed:
            self.close()
            self._on_closed(problem)

    def close(self) -> None:
        """Close the socket. Nothing is sent or received afterwards."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._drop_unsent()
        for fd in self._fds:
            if fd != _LOST:
                os.close(fd)
        self._fds.clear()
        self._socket.close()


class BlockingChannel:
    """The worker's end. Methods that send may be called from any thread, under a lock of the caller."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        """Without a socket, `connect` comes first."""
        self._reader = FrameReader(MAX_KERNEL_FRAME)
        self._fds: deque[int] = deque()
        self._sent = 0
        self._outbox: Outbox | None = None
        self._on_idle: Callable[[], None] | None = None
        #: See `Outbox.progress`; without an outbox the kernel does not see it.
        self.progress = memoryview(bytearray(8)).cast("Q")
        if sock is not None:
            self.connect(sock)

    def connect(self, sock: socket.socket) -> None:
        """Use this socket from now on, and own it."""
        sock.setblocking(True)
        self._socket = sock
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        #: `poll(0)` returns something if `receive` would not wait.
        self.poll = poller.poll
        #: To wait for the socket and for something else.
        self.fileno = sock.fileno

    def watch_idle(self, idle_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` each time when `receive` has waited for `idle_s` seconds. Costs other calls nothing."""
        self._on_idle = callback
        seconds, part = divmod(idle_s, 1)
        timeout = struct.pack("@ll", int(seconds), int(part * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def share_outbox(self) -> None:
        """Create the outbox and send its descriptor to the kernel."""
        outbox = Outbox()
        self.send_with_fd(OutboxCreated(), outbox.fd)
        outbox.sent(self._sent)
        self._outbox = outbox
        self.progress = outbox.progress

    def send_later(self, message: Message) -> None:
        """Put `message` into the outbox; send it now if there is no outbox, or no space in it.

        Raises `FrameTooLarge`; then nothing is sent.
        """
        try:
            encoded = encoder.encode(message)
        except UnicodeEncodeError:
            encoded = encoder.encode(encodable(message))
        data = LENGTH.pack(len(encoded)) + encoded  # repeats `frame`, to save a call for each response
        if self._outbox is None or not self._outbox.add(data):
            if len(encoded) > MAX_WORKER_FRAME:
                raise FrameTooLarge(len(encoded))
            self.flush()
            self._send(data)

    def send(self, message: Message) -> None:
        """Send the outbox and `message`; blocks until the socket has accepted all bytes."""
        self.send_later(message)
        self.flush()

    def flush(self) -> None:
        """Send the content of the outbox."""
        if self._outbox is not None:
            self._outbox.send_with(self._socket.sendall)

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)
        self._count_sent(len(data))

    def _count_sent(self, byte_size: int) -> None:
        self._sent += byte_size
        if self._outbox is not None:
            self._outbox.sent(byte_size)

    def send_with_fd(self, message: Message, fd: int) -> None:
        self.flush()
        data = frame(encoder.encode(message))
        sent = socket.send_fds(self._socket, [data], [fd])
        self._socket.sendall(data[sent:])
        self._count_sent(len(data))

    def receive(self, *, wait: bool = True) -> list[bytes] | None:
        """Return the complete messages of one read, perhaps none, or None at the end of the connection.

        Without `wait` it does not block, and returns an empty list if there is nothing to read; with `wait`, when it
        has waited for the time of `watch_idle`.
        """
        flags = _CLOEXEC if wait else _CLOEXEC | _DONTWAIT
        try:
            byte_size = max(self._reader.wanted, _READ_SIZE) if self._reader.wanted else _READ_SIZE
            data, ancillary, _, _ = self._socket.recvmsg(byte_size, _FD_SPACE, flags)
        except (BlockingIOError, InterruptedError):
            if wait and self._on_idle is not None:
                self._on_idle()
            return []
        except ConnectionResetError:
            return None
        if ancillary:
            self._fds.extend(descriptors_in(ancillary))
        return self._reader.feed(data) if data else None

    def take_fd(self) -> int:
        return self._fds.popleft()

    def forget_outbox(self) -> None:
        """For a forked child, whose parent goes on to use the outbox."""
        self._outbox = None

    def close(self) -> None:
        """End the connection, also if processes that the model has forked have the socket too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            outbox.close()


#: The worker's ends of connections in this process, with their sockets.
_channels: WeakKeyDictionary[BlockingChannel, socket.socket] = WeakKeyDictionary()


def leave_to_parent(channel: BlockingChannel, sock: socket.socket) -> None:
    """In processes that this one forks from now on, it is as if the kernel had closed `channel`, which uses `sock`."""
    if not _channels:
        os.register_at_fork(after_in_child=_leave_all)
    _channels[channel] = sock


def _leave_all() -> None:
    for channel, sock in _channels.items():
        channel.forget_outbox()
        _end(sock)


def _end(sock: socket.socket) -> None:
    """Put a socket whose other end is closed in the place of `sock`, which stays open in the parent."""
    if sock.fileno() < 0:  # closed
        return
    try:
        ours, theirs = socket.socketpair()
    except OSError:  # no descriptor is left
        sock.close()
        return
    theirs.close()
    os.dup2(ours.fileno(), sock.fileno(), inheritable=False)
    ours.close()
