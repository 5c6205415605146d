"""The server's log: Triton's two line formats, and settings that change while it runs.

One record is one line: messages are JSON-escaped, so that no client text can forge another line.
INFO goes to standard output, warnings and errors to standard error, as Triton does since 2025-06.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.settings import LogSettings

#: A longer message is cut: most of such a text is what a client sent.
MAX_MESSAGE = 8192

_LETTERS = {
    logging.DEBUG: "I",
    logging.INFO: "I",
    logging.WARNING: "W",
    logging.ERROR: "E",
    logging.CRITICAL: "E",
}


#: Characters beyond ASCII that end a line or steer a terminal; JSON leaves them as they are.
_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


class TritonFormatter(logging.Formatter):
    """Formats `I0115 12:34:56.123456 4242 router.py:12] "text"`, or its ISO8601 form. Times are UTC."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._settings = settings
        self._pid = os.getpid()

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if len(text) > MAX_MESSAGE:
            text = f"{text[:MAX_MESSAGE]}… ({len(text)} characters)"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        letter = _LETTERS.get(record.levelno, "I")
        where = f"{self._pid} {record.filename}:{record.lineno}]"
        quoted = json.dumps(text, ensure_ascii=False).translate(_CONTROLS)
        if self._settings.values.log_format == "ISO8601":
            return f"{when:%Y-%m-%dT%H:%M:%SZ} {letter} {where} {quoted}"
        return f"{letter}{when:%m%d %H:%M:%S.%f} {where} {quoted}"


class _Switch(logging.Filter):
    """Lets through what the settings of the moment ask for."""

    def __init__(self, settings: LogSettings, *, errors: bool) -> None:
        super().__init__()
        self._settings = settings
        self._errors = errors

    def filter(self, record: logging.LogRecord) -> bool:
        values = self._settings.values
        if record.levelno >= logging.ERROR:
            return self._errors and values.log_error
        if record.levelno >= logging.WARNING:
            return self._errors and values.log_warning
        if self._errors:
            return False
        return values.log_info if record.levelno >= logging.INFO else values.log_verbose_level > 0


def set_up_logging(settings: LogSettings) -> None:
    """Make the root logger write the server's log according to `settings`, now and after they change."""
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(logging.DEBUG)
    formatter = TritonFormatter(settings)
    for stream, errors in ((sys.stdout, False), (sys.stderr, True)):
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        handler.addFilter(_Switch(settings, errors=errors))
        root.addHandler(handler)
    # Libraries speak only when something is wrong; their debug lines are not ours.
    for name in ("asyncio", "aiohttp", "grpclib", "hpack", "h2"):
        logging.getLogger(name).setLevel(logging.WARNING)
