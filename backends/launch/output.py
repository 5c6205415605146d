"""How much of what a worker prints is logged: a rate for lines and one for bytes, each with a burst. Pure.

Logs what one worker prints and what its model logs, within limits, under the worker's title.

Reads a worker's standard output and error, line by line, for its `WorkerOutput`.

Each event-loop iteration does a limited amount of work: one read, and a few lines. The pipes are always read, so that a
model does not wait in `print`: what is above the limits of the output is read and dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from backends.launch.pipes import OutputPipes

if TYPE_CHECKING:
    from kernel.loop.clock import Clock

#: A worker that has been quiet may print what its rates allow for this many seconds at once.
BURST_S = 10

_NS = 1_000_000_000


class OutputLimits(msgspec.Struct, frozen=True):
    """The rates of one worker; 0 for no limit."""

    lines_per_s: int = 1000
    bytes_per_s: int = 1 << 20


class _Allowance:
    """A number that grows with time up to a limit (a token bucket)."""

    def __init__(self, rate_per_s: int, now_ns: int) -> None:
        self._rate_per_s = rate_per_s
        self._left: float = rate_per_s * BURST_S
        self._at_ns = now_ns

    def left(self, now_ns: int) -> bool:
        """Whether anything is left; always, without a rate."""
        grown = (now_ns - self._at_ns) * self._rate_per_s / _NS
        self._left = min(self._left + grown, self._rate_per_s * BURST_S)
        self._at_ns = now_ns
        return self._left >= 1 or not self._rate_per_s

    def spend(self, count: int) -> None:
        """Take `count`, also if less is left: then it takes longer until something is left again."""
        self._left -= count


class OutputAllowance:
    """What a worker may still print now."""

    def __init__(self, limits: OutputLimits, now_ns: int) -> None:
        self._lines = _Allowance(limits.lines_per_s, now_ns)
        self._bytes = _Allowance(limits.bytes_per_s, now_ns)

    def take(self, byte_size: int, now_ns: int) -> bool:
        """Whether a line of `byte_size` bytes may be logged; if so, it counts."""
        if not (self._lines.left(now_ns) and self._bytes.left(now_ns)):
            return False
        self._lines.spend(1)
        self._bytes.spend(byte_size)
        return True


logger = logging.getLogger("model")

#: Above the limits all output is dropped for this time. Then one line says how much it was.
PAUSE_NS = 1_000_000_000

#: How many lines are logged in one event-loop iteration. Formatting a line takes some 15 µs.
LINES_PER_ITERATION = 32

#: Lines of messages that wait for the next iterations. Without limits there may be more: then the oldest do not wait.
MAX_WAITING = 10_000

#: The longest text of a message that waits, in characters.
_MAX_TEXT = 8192


class WorkerOutput:
    """The lines of one worker, from its standard streams and from messages."""

    def __init__(self, title: str, limits: OutputLimits, clock: Clock) -> None:
        self._title = title
        self._limits = limits
        self._clock = clock
        self._allowance = OutputAllowance(limits, clock.now_ns())
        self._resume_alarm = clock.alarm(self._resume)
        #: Whether output is dropped now.
        self.dropping = False
        self._dropped_lines = self._dropped_bytes = 0
        #: Lines of messages: those that were logged in this iteration, and those that wait for the next ones.
        self._logged_now = 0
        self._waiting: deque[tuple[int, str]] = deque()
        self._closed = False

    def log(self, level: int, text: str) -> None:
        """Log a line of a message, now or in one of the next event-loop iterations, unless there are too many."""
        if not self.may_log(len(text)):
            self.drop(1, len(text))
            return
        if self._closed:
            self.log_always(level, text)
            return
        if not self._logged_now and not self._waiting:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        if self._logged_now < LINES_PER_ITERATION and not self._waiting:
            self._logged_now += 1
            self.log_always(level, text)
            return
        self._waiting.append((level, text[:_MAX_TEXT]))
        if len(self._waiting) > MAX_WAITING:
            self.log_always(*self._waiting.popleft())

    def _next_iteration(self) -> None:
        self._logged_now = 0
        for _ in range(min(LINES_PER_ITERATION, len(self._waiting))):
            self.log_always(*self._waiting.popleft())
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def may_log(self, byte_size: int) -> bool:
        """Whether a line of `byte_size` bytes may be logged; if so, it counts. Else output is dropped for a time."""
        if self.dropping:
            return False
        now_ns = self._clock.now_ns()
        if self._closed or self._allowance.take(byte_size, now_ns):
            return True
        self.dropping = True
        self._resume_alarm.set(now_ns + PAUSE_NS)
        return False

    def log_always(self, level: int, text: str) -> None:
        """Log a line that counts already, or that has to be seen."""
        logger.log(level, "%s: %s", self._title, text)

    def drop(self, line_count: int, byte_size: int) -> None:
        """Count output that is not logged."""
        self._dropped_lines += line_count
        self._dropped_bytes += byte_size

    def _resume(self) -> None:
        """Say what was dropped, and log again."""
        self.dropping = False
        if not self._dropped_bytes:
            return
        limits = [
            f"{rate} {unit}"
            for rate, unit in ((self._limits.lines_per_s, "lines"), (self._limits.bytes_per_s, "bytes"))
            if rate
        ]
        self.log_always(
            logging.WARNING,
            f"{self._dropped_lines} lines ({self._dropped_bytes} bytes) of output were dropped: more than "
            f"{' or '.join(limits)} per second (--log-model-lines, --log-model-bytes)",
        )
        self._dropped_lines = self._dropped_bytes = 0

    def close(self) -> None:
        """The worker has ended: log how much was dropped. Its last lines, which are few, are logged without a limit."""
        self._closed = True
        self._resume_alarm.close()
        while self._waiting:
            self.log_always(*self._waiting.popleft())
        self._resume()


#: The longest line in bytes. A longer one is cut, also if its end is not received yet.
MAX_LINE = 8192

#: How much is read in one event-loop iteration.
_READ_BYTE_SIZE = 64 << 10

#: When the worker has ended: how often the rest of a pipe is read (other processes may still write to it), and how many
#: of the last lines are logged, whatever the limits are. They often have the cause of the end.
_LAST_READS = 16

_LAST_LINES = 50

_TAIL_BYTE_SIZE = 8192


class OutputCapture:
    """Two pipes whose lines are logged: standard output as INFO, standard error as WARNING."""

    def __init__(self, output: WorkerOutput, pipes: OutputPipes | None = None) -> None:
        """Make the pipes, or take over those of a process that was started before; then `close` closes them."""
        self.output = output
        ends = OutputPipes() if pipes is None else pipes
        self.stdout_fd, self.stderr_fd = ends.stdout_fd, ends.stderr_fd
        self.close_child_ends = ends.close_child_ends
        self._pipes = [
            _CapturedPipe(ends.stdout, logging.INFO, output),
            _CapturedPipe(ends.stderr, logging.WARNING, output),
        ]

    def close(self) -> None:
        """The worker has ended: log the rest of what it has printed, and close the pipes."""
        for pipe in self._pipes:
            pipe.read_rest()
        self.output.close()
        for pipe in self._pipes:
            pipe.close()


class _CapturedPipe:
    """One pipe. It is read while the worker runs."""

    def __init__(self, fd: int, level: int, output: WorkerOutput) -> None:
        self._fd = fd
        self._level = level
        self._output = output
        self._loop = asyncio.get_running_loop()
        #: What was read and not logged: lines for the next iterations, and the beginning of a line.
        self._rest = b""
        #: The end of what was dropped.
        self._tail = b""
        #: Whether the beginning of the line in `_rest` was dropped.
        self._skipping = False
        #: Whether `_log_more` is called in the next iteration. Until then nothing is read.
        self._scheduled = False
        self._closed = False
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._readable)

    def _readable(self) -> None:
        if self._scheduled:
            return
        data = self._read()
        if data:
            self._rest += data
            self._log_lines()
        elif data is not None:
            self._loop.remove_reader(self._fd)  # the end: nobody writes to the pipe any more

    def _read(self) -> bytes | None:
        """Return what is in the pipe, b"" at its end, None if there is nothing now."""
        try:
            return os.read(self._fd, _READ_BYTE_SIZE)
        except BlockingIOError:
            return None

    def _log_more(self) -> None:
        self._scheduled = False
        if not self._closed:
            self._log_lines()

    def _log_lines(self) -> None:
        """Log some lines of `_rest`. If there are more, the next iteration continues."""
        if self._output.dropping:
            self._drop_rest()
            return
        if self._skipping:
            _, newline, self._rest = self._rest.partition(b"\n")
            self._skipping = not newline
        *lines, self._rest = self._rest.split(b"\n", LINES_PER_ITERATION)
        if len(self._rest) > MAX_LINE and b"\n" not in self._rest:
            lines.append(self._rest)
            self._rest = b""
        for number, line in enumerate(lines):
            if line and not self._output.may_log(min(len(line), MAX_LINE)):
                self._rest = b"\n".join((*lines[number:], self._rest))
                self._drop_rest()
                return
            self._log(line)
        if b"\n" in self._rest:
            self._scheduled = True
            self._loop.call_soon(self._log_more)

    def _log(self, line: bytes) -> None:
        text = line[:MAX_LINE].decode("utf-8", "replace").rstrip("\r")
        if text:
            self._output.log_always(self._level, text)

    def _drop_rest(self) -> None:
        """Drop what was read. This costs little, whatever it is."""
        rest, self._rest = self._rest, b""
        self._output.drop(rest.count(b"\n"), len(rest))
        self._tail = (self._tail + rest)[-_TAIL_BYTE_SIZE:]
        self._skipping = not rest.endswith(b"\n")

    # ---- the end -----------------------------------------------------------------------------

    def read_rest(self) -> None:
        """Read what is left in the pipe. Keeps the last lines, and drops others that were not logged."""
        self._closed = True
        self._loop.remove_reader(self._fd)
        counted = self._tail if self._output.dropping else b""  # as dropped; the last lines of it are logged after all
        text = counted + self._rest
        for _ in range(_LAST_READS):
            data = self._read()
            if not data:
                break
            text += data
        lines = text.split(b"\n")
        self._rest = b"\n".join(lines[-_LAST_LINES:])
        dropped_lines = max(len(lines) - _LAST_LINES, 0)
        self._output.drop(dropped_lines - counted.count(b"\n"), len(text) - len(self._rest) - len(counted))

    def close(self) -> None:
        """Log the last lines and close the pipe."""
        for line in self._rest.split(b"\n"):
            self._log(line)
        with contextlib.suppress(OSError):
            os.close(self._fd)
