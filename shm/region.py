"""Regions: memory that several processes share, with the handle that opens it.

A `Region` owns its handle, and its mapping if this process has mapped it. `drop` refuses new leases at once; handle and
mapping are closed when the last lease is released. Behind a region of host memory is one of two kinds of files:

- Memory of ours is a file without a name (memfd) whose size is sealed, so that several processes can map it without
  danger: it never raises SIGBUS when one of its pages is accessed (memfd_create(2), fcntl(2) "File Sealing"). The
  creator seals the file before another process gets its descriptor. A process that receives a descriptor checks the
  seals and the size before it maps the file.
- Memory of clients is a POSIX object. As shm_open(3), `open_object` opens only objects directly in the system's folder
  for shared memory. The key rules are stricter than in the C library, which cuts a key at a NUL byte and opens
  FIFOs.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import functools
import itertools
import mmap
import os
import stat
import threading
from typing import TYPE_CHECKING

import msgspec

from shm.lease import RegionLease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_numbers = itertools.count(1)

_mapping_lock = threading.Lock()


def new_region_number() -> int:
    """Return a number that no other region of this process has or had."""
    return next(_numbers)


class RegionKind(enum.Enum):
    SYSTEM = "system"  # POSIX shared memory that a client registered
    CUDA = "cuda"  # device memory that a client registered by an IPC handle
    ARENA = "arena"  # a memfd of ours
    DEVICE = "device"  # device memory that a worker has allocated


class FileHandle(msgspec.Struct):
    """A descriptor of a memfd or of a POSIX object. The region that has the handle closes it."""

    fd: int

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class CudaIpcHandle(msgspec.Struct):
    """Memory of a CUDA device: the handle that `cudaIpcGetMemHandle` returned in the exporting process."""

    #: The 64 bytes of a `cudaIpcMemHandle_t`.
    raw: bytes
    device_id: int
    closed: bool = False

    def close(self) -> None:
        """Mark the handle as closed. There is nothing to free: each process closes its own mapping."""
        self.closed = True


Handle = FileHandle | CudaIpcHandle


class Region:
    """Shared memory with a number that is unique in this process and is never used again.

    The region is `byte_size` bytes from `offset` of the memory that `handle` opens. `key` names the POSIX object of a
    client's region.
    """

    def __init__(
        self, name: str, kind: RegionKind, handle: Handle, byte_size: int, *, key: str = "", offset: int = 0
    ) -> None:
        """The region becomes the owner of `handle`."""
        self.number = new_region_number()
        self.name = name
        self.kind = kind
        #: Whether a client registered the region. The client may change its bytes at any time.
        self.of_client = kind is RegionKind.SYSTEM or kind is RegionKind.CUDA
        self.handle = handle
        self.byte_size = byte_size
        self.key = key
        self.offset = offset
        self.dropped = False
        #: Whether something is to be done when the last lease is released: `unused` must be called.
        self.awaits_end = False
        #: Whether the process that has allocated memory of a device is gone: nobody can open it any more.
        self.lost = False
        #: Whether processes copy the bytes with pread and pwrite and do not map them. Only for regions of clients.
        self.copied = False
        #: For an arena: the first bytes, as many as this, keep their pages, so that a worker may pin them for a GPU
        #: (docs/decisions/gpu-workers.md).
        self.steady_byte_size = 0
        #: For a client's region: gets regions that a process had mapped which died by SIGBUS (a client has shortened
        #: one), and which of them requests used.
        self.on_fault: Callable[[Sequence[Region], Sequence[Region]], None] | None = None
        #: The number of leases that have not been released. Only the region and its leases change it.
        self.lease_count = 0
        self._mapping: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._on_closed: list[Callable[[Region], None]] = []
        self._on_unused: list[Callable[[Region], None]] = []
        self._on_copied: list[Callable[[Region], None]] = []
        self._on_lost: list[Callable[[Region], None]] = []

    @property
    def fd(self) -> int:
        """The file descriptor. Only for a region with a `FileHandle`."""
        assert isinstance(self.handle, FileHandle), f"region {self.name} has no descriptor"
        return self.handle.fd

    @property
    def device_id(self) -> int:
        """The CUDA device of the memory; 0 for host memory."""
        return self.handle.device_id if isinstance(self.handle, CudaIpcHandle) else 0

    @property
    def closed(self) -> bool:
        return self.handle.closed

    def lease(self) -> RegionLease:
        """Return a new lease; the caller releases it once."""
        assert not self.dropped, f"region {self.name} was dropped"
        self.lease_count += 1
        return RegionLease(self)

    def map(self, *, writable: bool) -> mmap.mmap:
        """Map the region until it is closed. Only for arenas: a client could shorten its region while it is mapped."""
        assert not self.of_client, f"region {self.name} belongs to a client"
        assert self._mapping is None, f"region {self.name} is mapped already"
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._mapping = mmap.mmap(self.fd, self.byte_size, prot=protection)
        self._view = memoryview(self._mapping)
        return self._mapping

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return bytes of an arena. Maps it for reading if it is not mapped yet.

        The view is valid as long as its user has a lease. Any thread may ask for it: programs that embed the server
        read outputs in threads of their own.
        """
        if self._view is None:
            with _mapping_lock:
                if self._view is None:
                    self.map(writable=False)
        assert self._view is not None
        return self._view[offset : offset + byte_size]

    def drop(self) -> None:
        """Refuse new leases, and close the handle when the last lease is released."""
        self.dropped = self.awaits_end = True
        if not self.lease_count:
            self._close()

    def lose(self) -> None:
        """The process that has allocated the memory is gone. Only for memory of a device, which goes with it."""
        self.lost = True
        callbacks, self._on_lost = self._on_lost, []
        for callback in callbacks:
            callback(self)
        self.drop()

    def on_lost(self, callback: Callable[[Region], None]) -> None:
        """Call `callback` when the process that has allocated the memory is gone."""
        self._on_lost.append(callback)

    def on_closed(self, callback: Callable[[Region], None]) -> None:
        """Call `callback` once the region is dropped and has no lease, before its handle is closed."""
        self._on_closed.append(callback)

    def on_unused(self, callback: Callable[[Region], None]) -> None:
        """Call `callback` once, when the last lease is released. The region must be in use."""
        assert self.lease_count, f"region {self.name} is not in use"
        self._on_unused.append(callback)
        self.awaits_end = True

    def on_copied(self, callback: Callable[[Region], None]) -> None:
        """Call `callback` when the region must no longer be mapped."""
        self._on_copied.append(callback)

    def copy_from_now_on(self) -> None:
        """Make processes copy the bytes from now on, because their client has shortened a region."""
        if not self.copied:
            self.copied = True
            callbacks, self._on_copied = self._on_copied, []
            for callback in callbacks:
                callback(self)

    def unused(self) -> None:
        """The last lease was released. Only leases call this."""
        assert not self.lease_count, f"region {self.name}: more leases were released than taken"
        if self._on_unused or self.dropped:
            callbacks, self._on_unused = self._on_unused, []
            self.awaits_end = self.dropped
            for callback in callbacks:
                callback(self)
            if self.dropped and not self.lease_count:
                self._close()

    def _close(self) -> None:
        if not self.closed:
            callbacks, self._on_closed = self._on_closed, []
            for callback in callbacks:
                callback(self)
            self.handle.close()
            self._unmap()

    def _unmap(self) -> None:
        view, mapping = self._view, self._mapping
        # Not kept any longer: if other views exist, the mapping and its descriptor stay until the last view is freed.
        self._view = self._mapping = None
        if view is not None and mapping is not None:
            view.release()
            with contextlib.suppress(BufferError):
                mapping.close()


# ---- memory of ours -------------------------------------------------------------------------

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


# ---- memory of clients ----------------------------------------------------------------------

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


def is_reserved_key(key: str) -> bool:
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
