"""Sets up the server's log: its targets, and filters that follow the settings while the server runs.

INFO goes to standard output, warnings and errors to standard error, as in Triton since 2025-06. With a log file,
everything goes to the file. Code that logs formats its line and never waits: threads write the lines
(`kernel/observe/log_writer.py`). Lines that are lost are counted; the code that logs gets no error.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from kernel.observe.log_lines import LineFormatter
from kernel.observe.log_writer import FileTarget, LogWriter, StreamTarget

if TYPE_CHECKING:
    from kernel.observe.log_writer import LogTarget
    from kernel.settings import LogSettings

#: Messages are quoted and escaped unless this environment variable is "0".
ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"

#: The lowest level of a record. Verbose level 1 shows records from DEBUG on, each higher one a level lower.
_MOST_VERBOSE = 1

#: How long the end of the server waits for the reader of its log, in seconds.
CLOSE_TIMEOUT_S = 2.0


class ServerLog:
    """The threads that write the log, and the standard streams, to which tables and errors of the start are printed.

    A table and the log lines around it keep their order.
    """

    def __init__(self, settings: LogSettings) -> None:
        """Raises `BadOption` if the log file cannot be written."""
        self.formatter = LineFormatter(settings, escape=os.environ.get(ESCAPE_VARIABLE) != "0")
        path = settings.values.log_file
        self.file = self._writer(FileTarget(path)) if path else None
        self.stdout = self._writer(_stream_target(sys.stdout))
        # With one writer, lines keep their order where both streams are the same file.
        self.stderr = self.stdout if _same_file() else self._writer(_stream_target(sys.stderr))

    def _writer(self, target: LogTarget) -> LogWriter:
        return LogWriter(target, self._loss_line)

    def _loss_line(self, count: int) -> bytes:
        record = logging.LogRecord(
            __name__, logging.WARNING, __file__, 0, "%d log lines before this one could not be written", (count,), None
        )
        return _octets(f"{self.formatter.format(record)}\n")

    def print(self, text: str) -> None:
        """Write `text`, which ends with a line feed, to standard output. Never waits."""
        self.stdout.put(_octets(text, sys.stdout))

    def print_error(self, text: str) -> None:
        """Write `text`, which ends with a line feed, to standard error. Never waits."""
        self.stderr.put(_octets(text, sys.stderr))

    def show_status(self, text: str) -> None:
        """Show one line at the bottom of the terminal that standard output is, below the log; "" shows none.

        `text` is no wider than the terminal. Never waits.
        """
        self.stdout.show_status(_octets(text, sys.stdout))

    @property
    def _writers(self) -> set[LogWriter]:
        return {self.stdout, self.stderr} | ({self.file} if self.file is not None else set())

    @property
    def lost_line_count(self) -> int:
        """How many lines were dropped or could not be written since the start."""
        return sum(writer.lost_line_count for writer in self._writers)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written, at most `timeout_s` seconds. Returns whether they are."""
        end_s = time.monotonic() + timeout_s
        return all(writer.flush(end_s - time.monotonic()) for writer in self._writers)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the lines that wait, at most `timeout_s` seconds long. Later lines are lost."""
        self.flush(timeout_s)
        for writer in self._writers:
            writer.close(0)


def _same_file() -> bool:
    """Whether standard output and standard error are the same file, pipe or terminal."""
    if sys.stdout is None or sys.stderr is None:
        return False
    return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))


def _stream_target(stream: TextIO | None) -> StreamTarget:
    """Return the target for a standard stream. None is for one that was closed when the process began."""
    return StreamTarget(-1 if stream is None else stream.fileno())


def _octets(text: str, stream: TextIO | None = None) -> bytes:
    """Return `text` in the encoding of `stream`. Characters that the encoding lacks are escaped."""
    return text.encode(getattr(stream, "encoding", None) or "utf-8", "backslashreplace")


def set_up_logging(settings: LogSettings) -> ServerLog:
    """Make the root logger write the server's log by the current values of `settings`.

    The caller closes the returned log at the end of the process. Raises `BadOption` if the log file cannot be written.
    """
    log = ServerLog(settings)
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(_MOST_VERBOSE)
    if log.file is not None:
        root.addHandler(_LineHandler(log.file, log.formatter, SettingsFilter(settings)))
    else:
        for writer, stream, levels in ((log.stdout, sys.stdout, _INFORMATION), (log.stderr, sys.stderr, _PROBLEMS)):
            root.addHandler(_LineHandler(writer, log.formatter, SettingsFilter(settings, levels), stream))
    logging.captureWarnings(True)
    # The log has only warnings and errors of libraries; their verbose lines do not help users of the server.
    for name in ("asyncio", "aiohttp", "grpclib", "hpack", "h2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return log


_INFORMATION = range(logging.WARNING)
_PROBLEMS = range(logging.WARNING, logging.CRITICAL + 1)
_ALL = range(logging.CRITICAL + 1)


class SettingsFilter(logging.Filter):
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
    """Gives one line per record to a writer."""

    def __init__(
        self,
        writer: LogWriter,
        formatter: LineFormatter,
        settings_filter: SettingsFilter,
        stream: TextIO | None = None,
    ) -> None:
        """Lines have the encoding of `stream`."""
        super().__init__()
        self.setFormatter(formatter)
        self.addFilter(settings_filter)
        self._writer = writer
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        if self._writer.full:  # formatting costs more than all else
            self._writer.drop()
            return
        try:
            line = self.format(record)
        except Exception as error:  # a log call with wrong arguments; `handleError` would write to standard error
            line = self.format(_bad_call(record, error))
        self._writer.put(_octets(f"{line}\n", self._stream))


def _bad_call(record: logging.LogRecord, error: Exception) -> logging.LogRecord:
    """Return what is logged in place of a record that cannot be formatted."""
    return logging.LogRecord(
        record.name, logging.ERROR, record.pathname, record.lineno, "a line of the log could not be formatted: %r",
        (error,), None,
    )  # fmt: skip
