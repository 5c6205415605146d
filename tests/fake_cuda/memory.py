"""The memory of the fake devices: a POSIX object for each allocation."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
from pathlib import Path

_FOLDER = Path("/dev/shm")
_MAGIC = b"FAKECUDA"
_HANDLE = struct.Struct("<8sQQQQ")
_numbers = itertools.count(1)


class Mapping:
    """An allocation as one process sees it."""

    def __init__(self, name: str, byte_size: int, device: int, *, create: bool) -> None:
        """Raises `OSError`, and ValueError if the object is shorter."""
        self.path = _FOLDER / name
        self.byte_size, self.device = byte_size, device
        self.opened = 1
        if create:
            self.path.unlink(missing_ok=True)  # a process that had this id was killed
        fd = os.open(self.path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(fd, max(byte_size, 1))
            self._memory = mmap.mmap(fd, max(byte_size, 1))
        finally:
            os.close(fd)
        self._buffer = (ctypes.c_char * max(byte_size, 1)).from_buffer(self._memory)
        self.address = ctypes.addressof(self._buffer)


#: By address: what this process has allocated, with its number, and what it has opened, with its exporter and number.
own: dict[int, tuple[Mapping, int]] = {}
opened: dict[int, tuple[Mapping, tuple[int, int]]] = {}


def allocate(byte_size: int, device: int) -> int:
    """Return the address of new memory. Raises `OSError`."""
    number = next(_numbers)
    mapping = Mapping(f"fakecuda-{os.getpid()}-{number}", byte_size, device, create=True)
    own[mapping.address] = mapping, number
    return mapping.address


def free(address: int) -> bool:
    """Free memory of this process. What others have opened stays readable for them. Returns whether there was any."""
    found = own.pop(address, None)
    if found is not None:
        found[0].path.unlink()
    return found is not None


def handle_of(address: int) -> bytes | None:
    """Return the handle of memory of this process."""
    found = own.get(address)
    if found is None:
        return None
    mapping, number = found
    return _HANDLE.pack(_MAGIC, os.getpid(), number, mapping.byte_size, mapping.device).ljust(64, b"\0")


def open_handle(handle: bytes) -> int:
    """Return the address at which this process sees the memory. Raises `ValueError`, `OSError`, `PermissionError`."""
    magic, pid, number, byte_size, device = _HANDLE.unpack_from(handle)
    if magic != _MAGIC:
        raise ValueError("no handle")
    if pid == os.getpid():
        raise PermissionError("the exporter cannot open its own handle")
    for address, (mapping, exporter) in opened.items():
        if exporter == (pid, number):
            mapping.opened += 1
            return address
    os.kill(pid, 0)  # memory goes with its process; what is open elsewhere stays there
    mapping = Mapping(f"fakecuda-{pid}-{number}", byte_size, device, create=False)
    opened[mapping.address] = mapping, (pid, number)
    return mapping.address


def close_handle(address: int) -> bool:
    """Close memory of another process. Returns whether it was open."""
    found = opened.get(address)
    if found is None:
        return False
    found[0].opened -= 1
    if not found[0].opened:
        del opened[address]
    return True


def range_of(address: int) -> tuple[int, int] | None:
    """Return the begin and the size of the allocation that has this address."""
    # Of copies: to make pairs may collect garbage, which frees memory.
    for base, (mapping, _) in [*own.copy().items(), *opened.copy().items()]:
        if base <= address < base + mapping.byte_size:
            return base, mapping.byte_size
    return None
