"""Functions that helpers of tests run."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument
from kernel.serving.helper_tasks import TaskResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskFunction, TaskSteps


def reverse(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    """Write the sources, backwards, into memory of the kernel."""
    text = b"".join(sources)
    memory = yield str(len(text)).encode()
    memory[:] = text[::-1]
    return TaskResult(arguments)


def double(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    """Return the sources twice, in memory of the helper."""
    return TaskResult(b"twice", [*sources, *sources])
    yield b""


def refuse(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    error = InvalidArgument("wrong")
    error.before_queueing = True
    raise error
    yield b""


def fail(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    raise ValueError("a bug")
    yield b""


def take_too_much(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    return TaskResult(bytes(1 << 31))
    yield b""


def die(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    os.kill(os.getpid(), signal.SIGKILL)
    return TaskResult(b"")
    yield b""


def never_end(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    while True:
        time.sleep(60)
    yield b""


TASKS: dict[str, TaskFunction] = {
    "reverse": reverse,
    "double": double,
    "refuse": refuse,
    "fail": fail,
    "take_too_much": take_too_much,
    "die": die,
    "never_end": never_end,
}
