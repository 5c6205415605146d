"""Sets up the server's log: its targets, and filters that follow the settings while the server runs.

INFO goes to standard output, warnings and errors to standard error, as in Triton since 2025-06. With a log file,
everything goes to the file. Lines that cannot be written are counted; the code that logs gets no error.
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

#: Messages are quoted and escaped unless this environment variable is "0".
ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"

#: The lowest level of a record. Verbose level 1 shows records from DEBUG on, each higher one a level lower.
_MOST_VERBOSE = 1


class _Target(Protocol):
    """Writes lines."""

    def write(self, line: str) -> None:
        """Write `line`, which ends with a line feed. Raises `OSError` or `ValueError` on failure."""


def set_up_logging(settings: LogSettings) -> None:
    """Make the root logger write the server's log by the current values of `settings`.

    Raises `BadOption` if the log file cannot be written.
    """
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(_MOST_VERBOSE)
    formatter = LineFormatter(settings, escape=os.environ.get(ESCAPE_VARIABLE) != "0")
    if settings.values.log_file:
        root.addHandler(_LineHandler(_File(settings.values.log_file), formatter, _SettingsFilter(settings)))
    else:
        for stream, levels in ((sys.stdout, _INFORMATION), (sys.stderr, _PROBLEMS)):
            root.addHandler(_LineHandler(_Console(stream), formatter, _SettingsFilter(settings, levels)))
    logging.captureWarnings(True)
    # The log has only warnings and errors of libraries; their verbose lines do not help users of the server.
    for name in ("asyncio", "aiohttp", "grpclib", "hpack", "h2"):
        logging.getLogger(name).setLevel(logging.WARNING)


_INFORMATION = range(logging.WARNING)
_PROBLEMS = range(logging.WARNING, logging.CRITICAL + 1)
_ALL = range(logging.CRITICAL + 1)


class _SettingsFilter(logging.Filter):
    """Accepts the records in `levels` that the current settings enable."""

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
    """Writes one line per record; after lost lines, first a line with their number."""

    def __init__(self, target: _Target, formatter: LineFormatter, settings_filter: _SettingsFilter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.addFilter(settings_filter)
        self._target = target
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._lost:
                self._target.write(f"{self.format(self._loss_record(record))}\n")
                self._lost = 0
            self._target.write(f"{self.format(record)}\n")
        except (OSError, ValueError):  # a full disk, a closed pipe, a closed file
            self._lost += 1
        except Exception:  # a log call with wrong arguments: handled as in every logging handler
            self.handleError(record)

    def _loss_record(self, record: logging.LogRecord) -> logging.LogRecord:
        return logging.LogRecord(
            __name__, record.levelno, __file__, 0, "%d log lines before this one could not be written",
            (self._lost,), None,
        )  # fmt: skip


class _Console:
    """A standard stream. Characters that its encoding lacks are escaped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, line: str) -> None:
        encoding = self._stream.encoding or "ascii"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()


class _File:
    """A log file. Each line is appended with one write, so that other processes may append to the file as well."""

    def __init__(self, path: str) -> None:
        """Open or create the file at `path`. Raises `BadOption`."""
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadOption(f"--log-file '{path}' cannot be written: {reason}") from None
        #: The last line was written only in part, because the disk was full.
        self._torn = False

    def write(self, line: str) -> None:
        octets = line.encode(errors="backslashreplace")
        if self._torn:
            octets = b"\n" + octets
        written = os.write(self._fd, octets)
        self._torn = written < len(octets)
        if self._torn:
            raise OSError("the line was written only in part")
