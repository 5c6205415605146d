"""Logs a worker's standard output and error, line by line, with the model's name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

logger = logging.getLogger("model")

#: The longest line in bytes. A longer one is cut, also if its end is not received yet.
MAX_LINE = 8192


class OutputCapture:
    """Two pipes whose lines are logged with a title: standard output as INFO, standard error as WARNING."""

    def __init__(self, title: str) -> None:
        self._title = title
        stdout, self.stdout_fd = os.pipe2(os.O_CLOEXEC)
        try:
            stderr, self.stderr_fd = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(stdout)
            os.close(self.stdout_fd)
            raise
        self._open = {stdout: logging.INFO, stderr: logging.WARNING}
        self._partial = {stdout: b"", stderr: b""}
        loop = asyncio.get_running_loop()
        for fd in self._open:
            os.set_blocking(fd, False)
            loop.add_reader(fd, self._readable, fd)

    def close_child_ends(self) -> None:
        """Close our copies of the ends that the worker has inherited."""
        os.close(self.stdout_fd)
        os.close(self.stderr_fd)

    def close(self) -> None:
        """Log the rest of the pipes' content and close them."""
        for fd in list(self._open):
            while fd in self._open and self._readable(fd):
                pass
            self._end(fd)

    def _readable(self, fd: int) -> bool:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._end(fd)
            return False
        *lines, rest = (self._partial[fd] + data).split(b"\n")
        if len(rest) > MAX_LINE:
            lines.append(rest)
            rest = b""
        self._partial[fd] = rest
        for line in lines:
            self._log(fd, line)
        return True

    def _log(self, fd: int, line: bytes) -> None:
        text = line[:MAX_LINE].decode("utf-8", "replace").rstrip("\r")
        if text:
            logger.log(self._open[fd], "%s: %s", self._title, text)

    def _end(self, fd: int) -> None:
        if fd not in self._open:
            return
        asyncio.get_running_loop().remove_reader(fd)
        self._log(fd, self._partial[fd])
        del self._open[fd]
        with contextlib.suppress(OSError):
            os.close(fd)
