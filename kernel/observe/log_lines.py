"""Formats a log record as a line in one of Triton's two formats, or as a JSON object on one line.

Triton's formats have a file and a line of the source, which tools parse; JSON has the name of the logger instead. A
record is exactly one line. Text of a client, a model or an exception can neither end the line nor control a terminal.

A line names the model that the running code works for. Tasks and callbacks inherit it from the code that creates them:
the output of a worker, and later log lines about the worker, have the model for which the worker was started.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.settings import LogSettings

_model: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("model", default=None)


@contextlib.contextmanager
def about_model(name: str, version: int) -> Iterator[None]:
    """Log lines in this block, and in tasks that it starts, belong to a version of a model."""
    token = _model.set((name, str(version)))
    try:
        yield
    finally:
        _model.reset(token)


def current_model() -> tuple[str, str] | None:
    """Return name and version of the model that the running code works for, or None."""
    return _model.get()


#: A longer message is cut, in characters: most of such a text comes from a client.
MAX_MESSAGE = 8192

#: The same limits for a traceback and for one field of a JSON line.
_MAX_TRACEBACK = 32768

_MAX_FIELD = 512

#: Keys of `extra=` of a log call that JSON lines show.
FIELDS = (
    "request_id",
    "model",
    "version",
    "peer",
    "method",
    "path",
    "status",
    "bytes_in",
    "bytes_out",
    "duration_ms",
)

#: Other levels have the letter I: Triton uses it for verbose lines, too.
_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}

_LEVELS = {
    logging.INFO: "INFO",
    logging.WARNING: "WARNING",
    logging.ERROR: "ERROR",
    logging.CRITICAL: "ERROR",
}


class LineFormatter(logging.Formatter):
    """Formats records by the current settings. Times are UTC."""

    def __init__(self, settings: LogSettings, *, escape: bool = True) -> None:
        """Without `escape` (TRITON_SERVER_ESCAPE_LOG_MESSAGES=0) messages have no quotes."""
        super().__init__()
        self._settings = settings
        self._escape = escape
        self._pid = os.getpid()

    def format(self, record: logging.LogRecord) -> str:
        log_format = self._settings.values.log_format
        if log_format == "json":
            return self._json(record)
        text = _cut(record.getMessage(), MAX_MESSAGE)
        if record.exc_info:
            text = f"{text}\n{_cut(self.formatException(record.exc_info), _MAX_TRACEBACK)}"
        text = quote(text) if self._escape else _printable(text)
        time = _utc(record)
        letter = _LETTERS.get(record.levelno, "I")
        source = f"{self._pid} {record.filename}:{record.lineno}]"
        if log_format == "ISO8601":
            return f"{time:%Y-%m-%dT%H:%M:%SZ} {letter} {source} {text}"
        return f"{letter}{time:%m%d %H:%M:%S.%f} {source} {text}"

    def _json(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "timestamp": f"{_utc(record):%Y-%m-%dT%H:%M:%S.%fZ}",
            "level": _LEVELS.get(record.levelno, "VERBOSE"),
            "logger": record.name,
            "pid": self._pid,
            "message": _cut(record.getMessage(), MAX_MESSAGE),
        }
        if not hasattr(record, "model") and (about := current_model()) is not None:
            line["model"], line["version"] = about
        for name in FIELDS:
            value = getattr(record, name, None)
            if value not in (None, ""):
                line[name] = _cut(value, _MAX_FIELD) if isinstance(value, str) else value
        if record.exc_info:
            line["traceback"] = _cut(self.formatException(record.exc_info), _MAX_TRACEBACK)
        # ASCII only: no character ends the line, in any reader and any encoding.
        return json.dumps(line, separators=(",", ":"))


def quote(text: str) -> str:
    """Return `text` as a JSON string of visible characters only."""
    return _printable(json.dumps(text, ensure_ascii=False))


def _printable(text: str) -> str:
    """Return `text` with every invisible character as a JSON escape: line ends, terminal control sequences,
    marks that change the writing direction, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


def _utc(record: logging.LogRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC)
