"""Fixtures that restore the root logger after a test, and show what the log writes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from kernel.observe.logs import ServerLog, set_up_logging

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.capture import CaptureResult

    from kernel.settings import LogSettings

#: Threads of the log write in far less.
FLUSH_TIMEOUT_S = 60


@pytest.fixture
def root_logger(restore_root_logger: None) -> Iterator[logging.Logger]:
    """Return the root logger. The test may change its handlers and level."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    yield root
    root.handlers[:] = handlers


class LogOutput:
    """Sets up the log of this process and shows what it has written."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self.log: ServerLog

    def set_up(self, settings: LogSettings) -> None:
        self.log = set_up_logging(settings)

    def flush(self) -> None:
        assert self.log.flush(FLUSH_TIMEOUT_S)

    def read(self) -> CaptureResult[str]:
        """Return the new text of standard output and standard error."""
        self.flush()
        return self._capture.readouterr()


@pytest.fixture
def output(root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]) -> Iterator[LogOutput]:
    made = LogOutput(capfd)
    yield made
    if hasattr(made, "log"):
        made.log.close()
