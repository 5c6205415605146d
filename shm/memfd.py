"""Memory files without names (memfd) whose size is sealed, so that several processes can map them without danger.

A file whose size no process can change never raises SIGBUS when one of its pages is accessed (memfd_create(2), fcntl(2)
"File Sealing"). The creator seals the file before another process gets its descriptor. A process that receives a
descriptor checks the seals and the size before it maps the file.
"""

from __future__ import annotations

import fcntl
import functools
import os

#: The seals of all memory that is shared.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class NotSealedMemory(ValueError):
    """A descriptor from another process is not sealed memory of the announced size."""


def sealed_memfd(name: str, byte_size: int) -> int:
    """Return the descriptor of a new sealed file, which is sparse; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, byte_size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_only_fd(fd: int) -> int:
    """Return a new read-only descriptor of the same memory. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def check_sealed(fd: int, byte_size: int) -> None:
    """Raise `NotSealedMemory` unless `fd` is a sealed memfd of at least `byte_size` bytes, of usual pages."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise NotSealedMemory("the descriptor is not a memfd") from None
    if seals & SEALS != SEALS:
        raise NotSealedMemory(f"a memfd with seals {seals:#x}, expected {SEALS:#x}")
    status = os.fstat(fd)
    if status.st_dev != _memfd_device():
        # Access to a huge page that was punched out raises SIGBUS while the system has no other one: seals do not help.
        raise NotSealedMemory("a memfd of huge pages")
    if byte_size < 1 or status.st_size < byte_size:
        raise NotSealedMemory(f"a memfd of {status.st_size} bytes, announced as {byte_size}")


@functools.cache
def _memfd_device() -> int:
    """Return the device number of the file system that has all memfds of usual pages."""
    fd = os.memfd_create("naiad device", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)
