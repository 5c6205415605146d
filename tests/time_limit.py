"""Ends a test that waits without end on uvloop: a failure, where pytest-timeout alone lets it wait on.

pytest-timeout raises its failure in a signal handler, once. uvloop logs what such a handler raises, and goes on.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

#: A task may catch the failure, too, and the end of a test may hang as well: the failure is raised again and again.
AGAIN_S = 10.0


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, Any, Any]:
    result = yield
    fail = signal.getsignal(signal.SIGALRM)
    if not callable(fail):  # pytest-timeout uses a thread
        return result

    def end(number: int, frame: FrameType | None) -> None:
        loop = asyncio._get_running_loop()
        if isinstance(loop, uvloop.Loop):
            loop.stop()
        fail(number, frame)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
    return result
