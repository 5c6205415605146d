"""`pb_utils.Logger`: models write lines to the server's log."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TypeAlias

from backends.python.conversions import as_text
from backends.python.failures import incompatible_arguments
from backends.python.instance import current_instance


class _LogLevel(enum.IntEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    __str__ = enum.Enum.__str__  # as Triton's enumerations show themselves


_LogLevel.__name__ = "LogLevel"


class Logger:
    """Has only static methods: models call `pb_utils.Logger.log_info("text")`."""

    LogLevel: TypeAlias = _LogLevel

    INFO = _LogLevel.INFO
    WARNING = _LogLevel.WARNING
    ERROR = _LogLevel.ERROR
    VERBOSE = _LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: _LogLevel = _LogLevel.INFO) -> None:
        """Log `message` at `level`. VERBOSE lines appear only if the server logs verbosely."""
        text = as_text(message)
        if text is None or not isinstance(level, _LogLevel):
            signature = "(message: str, level: Logger.LogLevel = <LogLevel.INFO: 0>) -> None"
            raise incompatible_arguments("log", signature, message, level)
        current_instance().host.log(level.name, text)

    @staticmethod
    def log_info(message: str) -> None:
        """Log `message` at level INFO."""
        Logger.log(message, _LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """Log `message` at level WARNING."""
        Logger.log(message, _LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Log `message` at level ERROR."""
        Logger.log(message, _LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Log `message`, but only if the server logs verbosely."""
        Logger.log(message, _LogLevel.VERBOSE)
