"""Reads a worker's standard output and error, line by line, for its `WorkerOutput`.

Each event-loop iteration does a limited amount of work: one read, and a few lines. The pipes are always read, so that a
model does not wait in `print`: what is above the limits of the output is read and dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING

from backends.supervision.output.pipes import OutputPipes
from backends.supervision.output.worker_output import LINES_PER_ITERATION

if TYPE_CHECKING:
    from backends.supervision.output.worker_output import WorkerOutput

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
