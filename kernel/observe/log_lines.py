"""What a log record becomes: a line in one of Triton's two forms, or a JSON object on a line of its own.

One record is one line in every form: whatever a client, a model or an exception has put into a message, it
can neither end the line nor steer a terminal.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from typing import TYPE_CHECKING

from kernel.observe.log_context import current_model

if TYPE_CHECKING:
    from kernel.settings import LogSettings

#: A longer message is cut: most of such a text is what a client sent.
MAX_MESSAGE = 8192

#: The same for a traceback, and for the single values that JSON lines have.
_MAX_TRACEBACK = 32768
_MAX_FIELD = 512

#: What `extra=` of a log call may say; the JSON form shows it.
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

#: Triton writes verbose lines as I.
_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}
_LEVELS = {
    logging.INFO: "INFO",
    logging.WARNING: "WARNING",
    logging.ERROR: "ERROR",
    logging.CRITICAL: "ERROR",
}


class LineFormatter(logging.Formatter):
    """Formats records as the settings of the moment say. Times are UTC."""

    def __init__(self, settings: LogSettings, *, escape: bool = True) -> None:
        """Without `escape` messages have no quotes, as TRITON_SERVER_ESCAPE_LOG_MESSAGES=0 asks for."""
        super().__init__()
        self._settings = settings
        self._escape = escape
        self._pid = os.getpid()

    def format(self, record: logging.LogRecord) -> str:
        form = self._settings.values.log_format
        if form == "json":
            return self._json(record)
        text = _cut(record.getMessage(), MAX_MESSAGE)
        if record.exc_info:
            text = f"{text}\n{_cut(self.formatException(record.exc_info), _MAX_TRACEBACK)}"
        text = quote(text) if self._escape else _printable(text)
        when = _utc(record)
        letter = _LETTERS.get(record.levelno, "I")
        where = f"{self._pid} {record.filename}:{record.lineno}]"
        if form == "ISO8601":
            return f"{when:%Y-%m-%dT%H:%M:%SZ} {letter} {where} {text}"
        return f"{letter}{when:%m%d %H:%M:%S.%f} {where} {text}"

    def _json(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "timestamp": f"{_utc(record):%Y-%m-%dT%H:%M:%S.%fZ}",
            "level": _LEVELS.get(record.levelno, "VERBOSE"),
            "logger": record.name,
            "file": record.filename,
            "line": record.lineno,
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
        # ASCII only: whatever reads it and in whatever encoding, no character ends the line.
        return json.dumps(line, separators=(",", ":"))


def quote(text: str) -> str:
    """Return `text` as a JSON string in which everything can be seen and nothing else happens."""
    return _printable(json.dumps(text, ensure_ascii=False))


def _printable(text: str) -> str:
    """Return `text` with JSON's escapes for all that is no visible character: ends of lines, escape sequences,
    marks that change the direction of writing, halves of surrogate pairs."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


def _utc(record: logging.LogRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC)
