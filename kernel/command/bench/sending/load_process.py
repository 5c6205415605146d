"""A load process: `python -m kernel.command.bench.sending.load_process`, started by `naiad bench`.

It reads messages from its standard input and writes its results to its standard output. It ends when its input does, so
that it never outlives the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import resource
import select
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from kernel.command.bench.sending.connection import reason
from kernel.command.bench.sending.load_loop import LoadLoop
from kernel.command.bench.sending.messages import (
    LoadPoint,
    LoadProblem,
    LoadSetup,
    MessageFrames,
    StopLoad,
    framed,
    to_process,
)

if TYPE_CHECKING:
    from kernel.command.bench.sending.connection import LoadState
    from kernel.command.bench.sending.messages import ToProcess

#: prctl: how late the system may wake this process, in nanoseconds, so that it wakes others at the same time.
_SET_TIMER_SLACK = 29

_INPUT, _OUTPUT = 0, 1


class _StateModule(Protocol):
    def connect(self, head: bytes, *, streaming: bool, has_final: bool) -> LoadState:
        """Return the state of a new connection."""

    def sequence_id_bytes(self, sequence_id: int) -> bytes:
        """Return the id of a sequence as it stands in a request."""


class _Commands:
    """The messages of the standard input."""

    def __init__(self) -> None:
        self._frames = MessageFrames()
        self._found: deque[ToProcess] = deque()

    def next(self) -> ToProcess:
        """Wait for the next message. Ends the process at the end of the input."""
        while not self._found:
            self._read()
        return self._found.popleft()

    def stopped(self) -> bool:
        """Read once; return whether the load must end now."""
        self._read()
        stop = any(isinstance(each, StopLoad) for each in self._found)
        self._found = deque(each for each in self._found if not isinstance(each, StopLoad))
        return stop

    def _read(self) -> None:
        data = os.read(_INPUT, 1 << 20)
        if not data:
            os._exit(0)  # the command has ended
        self._found.extend(to_process.decode(each) for each in self._frames.feed(data))


def _write(message: Any) -> None:
    data = memoryview(framed(message))
    while data:
        try:
            data = data[os.write(_OUTPUT, data) :]
        except BlockingIOError:
            select.select((), (_OUTPUT,), ())
        except BrokenPipeError:
            os._exit(0)


def _report(message: Any) -> None:
    _write(message)


def main() -> None:
    """Run loads until the input ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError, ValueError):  # each connection is a file
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    commands = _Commands()
    setup = commands.next()
    assert isinstance(setup, LoadSetup)
    module: _StateModule = importlib.import_module(setup.protocol_module)
    new_state = functools.partial(module.connect, setup.head, streaming=setup.streaming, has_final=setup.has_final)
    loop = LoadLoop(setup, new_state, module.sequence_id_bytes, _INPUT)
    gc.freeze()
    gc.disable()  # nothing here has cycles; a collection would stand in the latencies
    while True:
        message = commands.next()
        if not isinstance(message, LoadPoint):  # a load that had ended already should be stopped
            continue
        try:
            _write(loop.run(message, commands.stopped, _report))
        except OSError as error:
            _write(LoadProblem(f"no connection to {setup.host}:{setup.port}: {reason(error)}"))


if __name__ == "__main__":
    main()
