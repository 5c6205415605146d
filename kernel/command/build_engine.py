"""`naiad build-engine`: starts the process that builds the engine. This process does not import TensorRT."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: A module of the backend, with the options of the command.
_MODULE = "backends.tensorrt.building"


def build_engine(arguments: Sequence[str]) -> int:
    """Build an engine in a process of its own, and return its exit code. The options are that process's."""
    with _left_to_the_child():
        ended = subprocess.run([sys.executable, "-m", _MODULE, *arguments], check=False)
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        sys.stderr.write(f"error: the process that builds was ended by {name}: TensorRT or the driver has failed\n")
        return 1
    return ended.returncode


@contextlib.contextmanager
def _left_to_the_child() -> Iterator[None]:
    """Leave Ctrl-C to the child, which ends its build and returns."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # Ignored signals are inherited; the child sets a handler of its own while it builds.
        yield
    finally:
        signal.signal(signal.SIGINT, before)
