"""Where the server's log goes, and which records get there: settings that change while it runs decide.

INFO goes to standard output, warnings and errors to standard error, as Triton does since 2025-06; with a log
file everything goes there. What cannot be written is counted, and never hurts who has logged it.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Protocol, TextIO

from kernel.observe.log_lines import LineFormatter
from kernel.options import BadOption

if TYPE_CHECKING:
    from kernel.settings import LogSettings

#: Anything but "0" keeps messages quoted and escaped.
ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"

#: The most verbose record that exists: verbose level 1 shows DEBUG, and each level above one number below it.
_MOST_VERBOSE = 1


class _Target(Protocol):
    """Where lines go."""

    def write(self, line: str) -> None:
        """Write a line with its end. Raises `OSError` or `ValueError` where it cannot be written."""


def set_up_logging(settings: LogSettings) -> None:
    """Make the root logger write the server's log according to `settings`, now and after they change.

    Raises `BadOption` for a log file that cannot be written.
    """
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(_MOST_VERBOSE)
    formatter = LineFormatter(settings, escape=os.environ.get(ESCAPE_VARIABLE) != "0")
    if settings.values.log_file:
        root.addHandler(_LineHandler(_File(settings.values.log_file), formatter, _Wanted(settings)))
    else:
        for stream, levels in ((sys.stdout, _INFORMATION), (sys.stderr, _PROBLEMS)):
            root.addHandler(_LineHandler(_Console(stream), formatter, _Wanted(settings, levels)))
    logging.captureWarnings(True)
    # Libraries speak only when something is wrong; their debug lines are not ours.
    for name in ("asyncio", "aiohttp", "grpclib", "hpack", "h2"):
        logging.getLogger(name).setLevel(logging.WARNING)


_INFORMATION = range(logging.WARNING)
_PROBLEMS = range(logging.WARNING, logging.CRITICAL + 1)
_ALL = range(logging.CRITICAL + 1)


class _Wanted(logging.Filter):
    """Lets through what the settings of the moment ask for, among `levels`."""

    def __init__(self, settings: LogSettings, levels: range = _ALL) -> None:
        super().__init__()
        self._settings = settings
        self._levels = levels

    def filter(self, record: logging.LogRecord) -> bool:
        values = self._settings.values
        if record.levelno not in self._levels:
            return False
        if record.levelno >= logging.ERROR:
            return values.log_error
        if record.levelno >= logging.WARNING:
            return values.log_warning
        if record.levelno >= logging.INFO:
            return values.log_info
        return values.log_verbose_level > logging.DEBUG - record.levelno


class _LineHandler(logging.Handler):
    """Writes one line per record, and how many were lost before."""

    def __init__(self, target: _Target, formatter: LineFormatter, wanted: _Wanted) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.addFilter(wanted)
        self._target = target
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._lost:
                self._target.write(f"{self.format(self._loss(record))}\n")
                self._lost = 0
            self._target.write(f"{self.format(record)}\n")
        except (OSError, ValueError):  # a full disk, a reader that has gone, a closed file
            self._lost += 1
        except Exception:  # a log call with wrong arguments: logging's own way to say so
            self.handleError(record)

    def _loss(self, record: logging.LogRecord) -> logging.LogRecord:
        return logging.LogRecord(
            __name__, record.levelno, __file__, 0, "%d log lines before this one could not be written",
            (self._lost,), None,
        )  # fmt: skip


class _Console:
    """A standard stream. What its encoding lacks is escaped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, line: str) -> None:
        encoding = self._stream.encoding or "ascii"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()


class _File:
    """A file that lines are appended to, each in one write: other processes may append to it, too."""

    def __init__(self, path: str) -> None:
        """Open or create it. Raises `BadOption`."""
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadOption(f"--log-file '{path}' cannot be written: {reason}") from None
        #: Whether the disk was full in the middle of the last line.
        self._torn = False

    def write(self, line: str) -> None:
        octets = line.encode(errors="backslashreplace")
        if self._torn:
            octets = b"\n" + octets
        written = os.write(self._fd, octets)
        self._torn = written < len(octets)
        if self._torn:
            raise OSError("only a part of the line was written")
