"""For all tests: none depends on how fast the machine is, none holds its event loop up, and each leaves the kernel's
state consistent."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from kernel.observe.limited_log import LimitedLog
from kernel.serving.instances import InstanceSet
from tests.slow_callbacks import pytest_runtest_call, pytest_runtest_teardown, watch
from tests.time_limit import pytest_timeout_set_timer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

__all__ = ["pytest_runtest_call", "pytest_runtest_teardown", "pytest_timeout_set_timer"]

# Else each server, zygote and worker that a test starts compiles all its modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the commands that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("naiad", deadline=None)
settings.load_profile("naiad")
watch()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Return the event loop of tests with the mark `anyio`: its lowest version tries trio, too, which is not there."""
    return "asyncio"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests: none of several processes is left with one when the others end.

    Otherwise the order is random (pytest-randomly).
    """
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Say in front of the list of failures how to repeat the order of the tests."""
    seed = getattr(terminalreporter.config.option, "randomly_seed", None)
    if exitstatus and seed is not None:
        terminalreporter.write_line(f"the order of these tests: --randomly-seed={seed}")


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Let reports with any text go from one process to the other, also with halves of surrogate pairs in a log."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _encodable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_encodable(each) for each in value)
    return value


def pytest_collection_finish() -> None:
    """Take the tests and their modules out of collections of garbage, which would walk through them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def check_requests_and_batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test, recompute the invariants of every model version that it made: see `InstanceSet.check`."""
    made: list[InstanceSet] = []
    make = InstanceSet.__init__

    def make_and_note(self: InstanceSet, *arguments: Any) -> None:
        make(self, *arguments)
        made.append(self)

    monkeypatch.setattr(InstanceSet, "__init__", make_and_note)
    yield
    for instances in made:
        instances.check()


@pytest.fixture(autouse=True)
def repeated_errors_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log all errors of a test, however many equal ones earlier tests have caused in the same process."""
    monkeypatch.setattr("kernel.observe.limited_log.FIRST_LINES", 1_000_000)


@pytest.fixture(autouse=True)
def restore_root_logger() -> Iterator[None]:
    """Begin with Python's own level, and undo what a command or a server of the test changes in the root logger."""
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    handlers = root.handlers[:]
    yield
    root.setLevel(logging.WARNING)
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    logging.captureWarnings(False)


class RecordedTimer:
    """The timer of a `LimitedLog`. It never rings by itself."""

    daemon = False

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def start(self) -> None:
        """Wait for a test that calls the function."""


@pytest.fixture
def recorded_timers(monkeypatch: pytest.MonkeyPatch) -> list[RecordedTimer]:
    """Return the timers of all `LimitedLog`, as they are started."""
    made: list[RecordedTimer] = []

    def timer(interval_s: float, function: Callable[[], None]) -> RecordedTimer:
        made.append(RecordedTimer(function))
        return made[-1]

    monkeypatch.setattr("kernel.observe.limited_log.Timer", timer)
    return made


@pytest.fixture
def log_two_lines(
    monkeypatch: pytest.MonkeyPatch, repeated_errors_are_logged: None, recorded_timers: list[RecordedTimer]
) -> Callable[[str], LimitedLog]:
    """Return a function that lets a `LimitedLog`, given by module and name, log two lines of each subject."""
    made: list[LimitedLog] = []
    monkeypatch.setattr("kernel.observe.limited_log.FIRST_LINES", 2)

    def replace(path: str) -> LimitedLog:
        module, _, name = path.rpartition(".")
        former: LimitedLog = getattr(importlib.import_module(module), name)
        made.append(LimitedLog(former.logger, former.level))
        monkeypatch.setattr(path, made[-1])
        return made[-1]

    return replace
