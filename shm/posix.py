"""POSIX shared memory of clients: checks keys, opens objects, reads their sizes.

As shm_open(3), it opens only objects directly in the system's folder for shared memory. The key rules are stricter than
those of the C library, which cuts a key at a NUL byte and opens FIFOs.
"""

from __future__ import annotations

import os
import stat

#: Where Linux keeps POSIX shared memory (shm_overview(7)).
FOLDER = "/dev/shm"

#: Keys that Triton reserves for its own workers. Our workers' memory has no names, but such keys are refused too.
RESERVED_PREFIX = "triton_python_backend_shm_region_"

_MAX_KEY = 255


class BadKey(ValueError):
    """The key is not a valid name of a client's shared memory object."""


class CannotOpen(OSError):
    """The object does not exist, is not a regular file, or we may not open it."""


def object_name(key: str) -> str:
    """Return the object's name in the folder: `key` without its leading slashes.

    Raises `BadKey` for keys that shm_open would refuse or misread: with a slash inside, with control characters, `.`,
    `..`, empty, or longer than 255 bytes.
    """
    name = key.lstrip("/")
    plain = name not in ("", ".", "..") and "/" not in name and name.isprintable()
    if not plain or len(name.encode("utf-8", "surrogatepass")) > _MAX_KEY:
        raise BadKey(key)
    return name


def is_reserved(key: str) -> bool:
    """Whether the key, without its leading slashes, starts with the reserved prefix."""
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
    """Return the size of the object in bytes. Its owner can change it at any time."""
    return os.fstat(fd).st_size
