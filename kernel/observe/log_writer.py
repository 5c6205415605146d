"""Writes lines of the log in a thread of its own: only this thread waits when the log is not read.

Lines that wait are limited in number and in bytes. When the queue is full, further lines are dropped. The queue
remembers how many were dropped, and between which lines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from kernel.errors import BadOption

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The most lines and bytes that wait. One line may exceed the limit of the bytes.
MAX_LINES = 16384

MAX_BYTE_SIZE = 8 << 20

#: How many bytes are taken at a time: what a pipe holds.
PORTION_BYTE_SIZE = 64 << 10

#: A line with its end, or the number of lines that were dropped at its place.
QueuedLine = bytes | int


class LineQueue:
    """Lines in their order. It has no lock: the owner calls one method at a time."""

    def __init__(self, max_lines: int = MAX_LINES, max_byte_size: int = MAX_BYTE_SIZE) -> None:
        self._max_lines = max_lines
        self._max_byte_size = max_byte_size
        self._items: deque[QueuedLine] = deque()
        self._line_count = 0
        self._byte_size = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def full(self) -> bool:
        """Whether the next line is to be dropped."""
        return self._line_count >= self._max_lines or self._byte_size >= self._max_byte_size

    def put(self, line: bytes) -> None:
        """Add a line. The queue must not be full."""
        self._items.append(line)
        self._line_count += 1
        self._byte_size += len(line)

    def drop(self) -> None:
        """Count a line that is dropped."""
        if self._items and isinstance(self._items[-1], int):
            self._items[-1] += 1
        else:
            self._items.append(1)

    def take(self) -> list[QueuedLine]:
        """Remove and return the oldest lines, together about `PORTION_BYTE_SIZE` bytes."""
        taken: list[QueuedLine] = []
        byte_size = 0
        while self._items and byte_size < PORTION_BYTE_SIZE:
            item = self._items.popleft()
            taken.append(item)
            if isinstance(item, bytes):
                byte_size += len(item)
                self._line_count -= 1
        self._byte_size -= byte_size
        return taken


class LogTarget(Protocol):
    """Where lines are written."""

    def write(self, lines: bytes) -> int:
        """Write `lines`, which end with a line feed, and return how many of their bytes were written. May block."""


class StreamTarget:
    """A descriptor of standard output or standard error. Nobody else closes it. A `LogTarget`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, lines: bytes) -> int:
        written = 0
        with memoryview(lines) as rest:
            while written < len(lines):
                try:
                    written += _write_soon(self._fd, rest[written:])
                except OSError:  # its reader has closed it
                    break
        return written


def _write_soon(fd: int, lines: bytes | memoryview) -> int:
    """Write `lines` or a part of them, as soon as there is room; returns how many bytes. Raises `OSError`."""
    while True:
        try:
            return os.write(fd, lines)
        except BlockingIOError:  # a FIFO, or a pipe or terminal that another process has made non-blocking
            room = select.poll()
            room.register(fd, select.POLLOUT)
            room.poll()


_STDERR = 2

#: How often it is looked whether the log file was moved away, in seconds.
_LOOK_S = 1.0


class FileTarget:
    """A log file. Lines are appended with one write, so that other processes may append to the file as well.

    If it is moved away or removed, as logrotate does, a new one is begun at its path.
    """

    def __init__(self, path: str, look_s: float = _LOOK_S) -> None:
        """Open or create the file at `path`. Raises `BadOption`."""
        self._path = os.path.abspath(path)
        self._look_s = look_s
        self._next_look_s = 0.0
        try:
            self._fd = self._open()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            if isinstance(error, OSError) and error.errno == errno.ENXIO:
                reason = "it is a FIFO that no process reads, or a device that is not there"
            raise BadOption(f"--log-file '{path}' cannot be written: {reason}") from None
        #: Whether the last write has failed, and standard error says so.
        self._reported = False
        #: The last line was written only in part, because the disk was full.
        self._torn = False

    def write(self, lines: bytes) -> int:
        if (now_s := time.monotonic()) >= self._next_look_s:
            self._next_look_s = now_s + self._look_s
            self._follow()
        end_of_torn = b"\n" if self._torn else b""
        try:
            written = _write_soon(self._fd, end_of_torn + lines)
        except OSError as error:  # a full disk
            self._report(error)
            return 0
        self._reported = False
        self._torn = written < len(end_of_torn) + len(lines)
        return max(written - len(end_of_torn), 0)

    def _report(self, error: OSError) -> None:
        """Write once to standard error that the file cannot be written."""
        if self._reported:
            return
        self._reported = True
        room = select.poll()
        room.register(_STDERR, select.POLLOUT)
        if room.poll(0):
            with contextlib.suppress(OSError):
                os.write(_STDERR, f"the log file '{self._path}' cannot be written: {error.strerror}\n".encode())

    def _open(self) -> int:
        # Without O_NONBLOCK the opening of a FIFO waits for its reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(self._path, flags, 0o644)

    def _follow(self) -> None:
        """Begin a new file if that at the path is no longer the open one. Where none can be made, the old one stays."""
        with contextlib.suppress(OSError):
            try:
                if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                    return
            except FileNotFoundError:
                pass
            new = self._open()
            os.close(self._fd)
            self._fd, self._torn = new, False


#: Erases the line that the cursor of a terminal is in.
_ERASE_LINE = b"\x1b[2K"


class LogWriter:
    """A thread with a queue of lines. Lines that find the queue full, or that cannot be written, are counted, and one
    line says how many they were as soon as a line can be written again."""

    def __init__(self, target: LogTarget, loss_line: Callable[[int], bytes], waiting: LineQueue | None = None) -> None:
        """`loss_line` returns the line about a number of lost lines; the thread calls it."""
        self._target = target
        self._loss_line = loss_line
        self._waiting = LineQueue() if waiting is None else waiting
        #: How many lines were lost since the start.
        self.lost_line_count = 0
        #: Lost lines about which no line was written.
        self._unreported = 0
        #: A line below all others, without its end, which the next lines replace: see `show_status`.
        self._status = b""
        self._status_shown = False
        self._idle = True
        self._closed = False
        # Reentrant: the garbage collector may log while this thread has the lock.
        self._changed = threading.Condition(threading.RLock())
        # A daemon: a thread that waits for a reader must not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name="naiad log", daemon=True)
        self.thread.start()

    @property
    def full(self) -> bool:
        """Whether the next line will be lost. Then it need not be formatted: call `drop`."""
        return self._waiting.full

    def put(self, line: bytes) -> None:
        """Write a line, which ends with a line feed, as soon as possible. Never waits."""
        with self._changed:
            if self._closed or self._waiting.full:
                self.drop()
                return
            self._waiting.put(line)
            self._wake()

    def show_status(self, status: bytes) -> None:
        """Keep a line below the log, on a terminal; b"" for none. It fits into the terminal. Never waits."""
        with self._changed:
            self._status = status
            if not self._closed and not self._waiting.full:
                self._waiting.put(b"")
                self._wake()

    def drop(self) -> None:
        """Count a line that is not written."""
        with self._changed:
            self.lost_line_count += 1
            self._waiting.drop()
            self._wake()

    def _wake(self) -> None:
        if self._idle:
            self._idle = False
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until no line waits, at most `timeout_s` seconds. Returns whether that is so."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._idle:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not self.thread.is_alive():
                    return False
                self._changed.wait(left_s)
        return True

    def close(self, timeout_s: float) -> None:
        """Write what waits, at most `timeout_s` seconds long, and end. Later lines are lost."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if not self._idle:
                        self._idle = True
                        self._changed.notify_all()
                    if self._closed:
                        return
                    self._changed.wait()
                items = self._waiting.take()
            self._write(items)

    def _write(self, items: Sequence[QueuedLine]) -> None:
        """Write lines, and between them how many are lost."""
        # Each line, and the number of lost lines that it reports; 0 for one that reports none.
        lines: list[tuple[bytes, int]] = []
        lost, self._unreported = self._unreported, 0
        for item in (*items, b""):
            if isinstance(item, int):
                lost += item
                continue
            if lost:
                lines.append((self._loss_line(lost), lost))
                lost = 0
            if item:
                lines.append((item, 0))
        status = self._status
        erased = _ERASE_LINE if self._status_shown or status else b""
        shown = status + b"\r" if status else b""  # the next line begins where this one does
        self._status_shown = bool(status)
        written = self._target.write(b"".join((erased, *(line for line, _ in lines), shown)))
        end = len(erased)
        lost_now = 0
        for line, reported in lines:
            end += len(line)
            if end > written:
                self._unreported += reported or 1
                lost_now += not reported
        if lost_now:
            with self._changed:
                self.lost_line_count += lost_now
