"""Starts a worker on an interpreter that is not the server's: `PYTHON start.py --fd N --kernel N --model NAME ...`.

This interpreter has its own installed packages, and not ours. So this file finds our packages beside itself, and puts a
stand-in in place of msgspec where there is none. It imports nothing of ours before it has looked at what is there, so
that it can say what is missing: to the kernel in place of `Hello`, also on versions of Python that are too old.
"""

import os
import socket
import struct
import sys
from typing import Any, Callable

#: The oldest version of Python that runs the code of workers, and the oldest on which msgspec reads its annotations.
OLDEST = (3, 9)
OLDEST_FOR_MSGSPEC = (3, 10)

#: The oldest version of msgspec that the code of workers is written for.
MSGSPEC = (0, 19)

_PACKAGES = ("backends", "kernel", "shm")


def main() -> None:
    """Import what a worker needs, and run it."""
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == here:
        del sys.path[0]
    fd = int(next(word.split("=")[1] for word in sys.argv if word.startswith("--fd=")))
    try:
        run_worker_main = _import_worker(os.path.dirname(os.path.dirname(here)))
    except _CannotRun as error:
        _refuse(fd, str(error))
        sys.exit(1)
    run_worker_main()


class _CannotRun(Exception):
    """The message says what is missing."""


def _import_worker(root: str) -> Callable[[], None]:
    """Return the function that runs the worker. Raises `_CannotRun`."""
    if sys.version_info < OLDEST:
        raise _CannotRun("it has Python %d.%d; a worker needs %d.%d or newer" % (sys.version_info[:2] + OLDEST))
    try:
        import numpy  # noqa: F401 - only to find out whether it is there
    except ImportError as error:
        raise _CannotRun("numpy cannot be imported, which a worker needs: %s" % error)
    finder = _OurPackages(root)
    sys.meta_path.insert(0, finder)
    if not _has_msgspec():
        from backends.portable.stand_in import make_stand_in

        # Only for the imports that follow: a library of the model must not find it.
        sys.modules["msgspec"] = stand_in = make_stand_in()
    else:
        stand_in = None
    try:
        from backends.python import (
            backend,  # noqa: F401 - imported now, before a model can have modules with our names
            model_modules,
        )
        from backends.worker.process import main as worker_main

        model_modules.own_interpreter = True
    except ImportError as error:
        raise _CannotRun("the code of workers cannot be imported: %s" % error)
    finally:
        sys.meta_path.remove(finder)
        if stand_in is not None and sys.modules.get("msgspec") is stand_in:
            del sys.modules["msgspec"]
    return worker_main


def _has_msgspec() -> bool:
    """Whether there is a msgspec that works with the code of workers."""
    if sys.version_info < OLDEST_FOR_MSGSPEC:
        return False
    try:
        import msgspec

        return tuple(int(part) for part in msgspec.__version__.split(".")[:2]) >= MSGSPEC
    except (ImportError, AttributeError, ValueError):
        return False


class _OurPackages:
    """Finds our packages in the folder that this file is in, whatever is installed under their names."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is None and name in _PACKAGES:
            from importlib.machinery import PathFinder

            return PathFinder.find_spec(name, [self._root], target)
        return None


def _refuse(fd: int, text: str) -> None:
    """Send `LoadFailed` in place of `Hello`: a msgpack array of three texts, framed as in `transport/framing.py`."""
    message = b"\x93"
    for part in ("LoadFailed", "unavailable", text):
        data = part.encode("utf-8", "replace")[:60000]
        message += b"\xda" + struct.pack(">H", len(data)) + data
    connection = socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sendall(struct.pack("<I", len(message)) + message)
    connection.close()


if __name__ == "__main__":
    main()
