"""Opens files that others have put there, without ever waiting for a writer, a device or the kernel's own files.

Whatever reads a path that an operator or a model has named uses this: a FIFO in its place would stop its reader for
ever, a device or a file of /proc may do so, or has no end.
"""

from __future__ import annotations

import errno
import os
import stat

#: Without O_NONBLOCK the opening of a FIFO waits for its writer.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

#: What is read of a file at once.
_PORTION = 1 << 20

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class NotRegular(OSError):
    """The path leads to a FIFO, a device, a socket, or a file that the operating system makes up."""

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        super().__init__(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return the descriptor of the regular file at `path`, for reading. Follows links. The caller closes it.

    Raises `OSError`: `NotRegular` for anything else than a file on a file system.
    """
    _check(path, os.stat(path))  # before it is opened: that alone does something to some devices
    fd = os.open(path, _FLAGS)
    try:
        _check(path, os.fstat(fd))  # it may have been replaced meanwhile
    except OSError:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str], max_byte_size: int) -> bytes:
    """Return the content of the regular file at `path`, of a longer one the first `max_byte_size` bytes.

    Raises `OSError` as `open_regular`.
    """
    fd = open_regular(path)
    try:
        content = bytearray()
        while len(content) < max_byte_size:
            portion = os.read(fd, min(_PORTION, max_byte_size - len(content)))
            if not portion:
                break
            content += portion
    finally:
        os.close(fd)
    return bytes(content)


def _check(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Raise `OSError` unless `status` describes a file that can be read to its end without waiting."""
    mode = status.st_mode
    if stat.S_ISREG(mode):
        if status.st_dev == _proc_device():
            raise NotRegular(path, "in /proc")
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise NotRegular(path, next((kind for is_kind, kind in _KINDS if is_kind(mode)), "something else"))


def _proc_device() -> int:
    """Return the number of the device of /proc; -1 without one."""
    try:
        return os.stat("/proc/self").st_dev
    except OSError:
        return -1
