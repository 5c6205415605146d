"""POSIX shared memory of clients: which keys are acceptable, opening them, and how large they are.

Only names directly in the system's folder for shared memory can be opened, as with shm_open(3). The
key rules are our own: the C library cuts a key at a NUL byte and opens FIFOs.
"""

from __future__ import annotations

import os
import stat

#: Where Linux keeps POSIX shared memory (shm_overview(7)).
FOLDER = "/dev/shm"

#: Keys that Triton reserves for its own workers; ours have no names, but the answer stays the same.
RESERVED_PREFIX = "triton_python_backend_shm_region_"

_MAX_KEY = 255


class BadKey(ValueError):
    """The key can name no shared memory object of a client."""


class CannotOpen(OSError):
    """There is no such object, or it is not a plain shared memory object that we may use."""


def object_name(key: str) -> str:
    """Return the object's name in the folder: `key` without its leading slashes.

    Raises `BadKey` for what shm_open would refuse or misread: a slash inside, control characters,
    `.` and `..`, nothing at all, more than 255 bytes.
    """
    name = key.lstrip("/")
    plain = name not in ("", ".", "..") and "/" not in name and name.isprintable()
    if not plain or len(name.encode("utf-8", "surrogatepass")) > _MAX_KEY:
        raise BadKey(key)
    return name


def is_reserved(key: str) -> bool:
    """Whether the key starts with the prefix that is reserved, however many slashes are in front."""
    return key.lstrip("/").startswith(RESERVED_PREFIX)


def open_object(key: str) -> int:
    """Open the object called `key` for reading and writing; the caller owns the descriptor.

    Raises `BadKey` and `CannotOpen`. Never follows a symbolic link, never blocks on a FIFO.
    """
    name = object_name(key)
    try:
        fd = os.open(f"{FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CannotOpen(error.errno, "cannot be opened") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CannotOpen(0, "is not a shared memory object")
    return fd


def size_of(fd: int) -> int:
    """Return how many bytes the object has now: its owner can change that at any time."""
    return os.fstat(fd).st_size
