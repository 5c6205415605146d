"""Traces in files: which file each trace goes to, and the helper's task that writes them, in Triton's JSON.

Triton's rules (tracer.cc): `FILE` if there is no log frequency. With a log frequency of N, each N traces have a file of
their own, `FILE.0`, `FILE.1` and so on; children do not count. Traces that are limited in number have one such file,
too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.records.trace import TraceRecord, UsualTrace
from kernel.records.trace_json import trace_json
from kernel.serving.helper_tasks import TaskResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from kernel.settings import TraceValues


_UNLIMITED = 1 << 62


class KeptPart(msgspec.Struct, array_like=True, frozen=True):
    """What a file keeps when traces are added: all but its end. Nothing of a file that is not written yet."""

    byte_size: int = 0
    #: The last of these bytes. They say that the file is still the one that was written.
    end: bytes = b""


class TraceFile(msgspec.Struct, eq=False):
    """A file that is being written."""

    path: str
    #: What is kept when traces are added.
    kept: KeptPart = KeptPart()


class TraceFiles:
    """The files of a server."""

    def __init__(self) -> None:
        self._files: dict[str, TraceFile] = {}
        self._next_index: dict[str, int] = {}

    def shared(self, path: str) -> TraceFile:
        """Return the file of all traces that are neither limited in number nor have a log frequency."""
        return self._files.setdefault(path, TraceFile(path))

    def next(self, path: str) -> TraceFile:
        """Return a new file with the next index."""
        index = self._next_index.get(path, 0)
        self._next_index[path] = index + 1
        return TraceFile(f"{path}.{index}")


class FileChoice:
    """Chooses the files of the traces that have the same settings."""

    def __init__(self, values: TraceValues, path: str, files: TraceFiles) -> None:
        """`path` is the absolute path of the file in `values`."""
        self._path = path
        self._files = files
        self._frequency = values.log_frequency
        #: Whether the traces are in files with an index.
        self._indexed = values.log_frequency > 0 or values.trace_count >= 0
        #: How many more traces of clients' requests the present file takes; 0 before the first file. The output that
        #: gives a trace to the file counts it here: a call for each trace would take too long.
        self.room = 0

    def next_file(self) -> TraceFile:
        """Return the file of the next traces, when the present one has no room or there is none."""
        self.room = self._frequency or _UNLIMITED
        return self._files.next(self._path) if self._indexed else self._files.shared(self._path)


#: The name of the function.
WRITE_TRACES = "traces.write"

#: How much of a file is copied at a time.
_COPY_BYTE_SIZE = 1 << 20

#: What traces leave free of a disk, so that other programs can still write: bytes and files, or this share of the disk
#: if that is less. With a log frequency the number of files has no limit, and clients can set one.
_FREE_BYTE_SIZE = 1 << 30

_FREE_FILES = 10_000

_FREE_SHARE = 20


#: How many bytes at the end of what is kept are compared, to know that the file is still ours.
_END_BYTE_SIZE = 128


class WriteArguments(msgspec.Struct, array_like=True):
    """Add these traces to the part of the file that is kept."""

    path: str
    kept: KeptPart
    records: list[TraceRecord | UsualTrace]


class WriteResult(msgspec.Struct, array_like=True):
    """What of the file is kept the next time; or why it cannot be written, and how many traces it lacks."""

    kept: KeptPart = KeptPart()
    error: str = ""
    lost: int = 0
    #: How long it took, in seconds.
    took_s: float = 0.0


encode_arguments = msgspec.msgpack.Encoder().encode

decode_write_result = msgspec.msgpack.Decoder(WriteResult).decode

_decode_arguments = msgspec.msgpack.Decoder(WriteArguments).decode


def write_traces_task(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    """Add traces to a file."""
    yield from ()  # a task function is a generator, and this one needs no memory
    begin_s = time.monotonic()
    wanted = _decode_arguments(arguments)
    try:
        result = WriteResult(write_traces(wanted))
    except OSError as error:
        result = WriteResult(error=error.strerror or str(error), lost=len(wanted.records))
    except ValueError as error:
        result = WriteResult(error=str(error), lost=len(wanted.records))
    result.took_s = time.monotonic() - begin_s
    return TaskResult(msgspec.msgpack.encode(result))


def write_traces(wanted: WriteArguments) -> KeptPart:
    """Write a new file beside the old one and put it in its place, so that a reader always finds complete JSON.

    Only the user of the server may read a file with tensors, which are data of clients. A file that keeps its content
    keeps its mode too, as long as no tensors are added.

    Returns what of it is to be kept the next time. Raises OSError, and ValueError if there is something at the path
    that is not a file, or another program writes it; then the old file is unchanged.
    """
    path = os.path.realpath(wanted.path)
    kept, old_mode = _kept_part(path, wanted)
    tensors = any(type(record) is TraceRecord and record.tensors for record in wanted.records)
    new = b",\n".join(map(trace_json, wanted.records))
    check_free(os.statvfs(os.path.dirname(path)), kept + len(new))
    aside = f"{path}.part"
    with open(_new_file(aside, 0o600 if kept or tensors else 0o666), "wb") as file:
        try:
            if kept:
                if not tensors:
                    with contextlib.suppress(OSError):  # some file systems have no modes
                        os.fchmod(file.fileno(), old_mode)
                with open(path, "rb") as old:
                    _copy(old.fileno(), file.fileno(), kept)
                file.seek(0, os.SEEK_END)
            new = (b",\n" if kept else b"[\n") + new
            file.write(new)
            size = file.tell()
            file.write(b"\n]\n")
            file.flush()
            os.replace(aside, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
    return KeptPart(size, new[-_END_BYTE_SIZE:])


def _kept_part(path: str, wanted: WriteArguments) -> tuple[int, int]:
    """Return how many bytes of the file are kept, and its mode."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0, 0  # the file was moved or removed: begin a new one
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a file")
    kept, end = wanted.kept.byte_size, wanted.kept.end
    if not kept or not found.st_size:
        return 0, 0
    with open(path, "rb") as file:
        file.seek(max(0, kept - len(end)))
        if file.read(len(end)) != end:
            raise ValueError("another program writes it, too; each server needs a file of its own")
    return kept, stat.S_IMODE(found.st_mode)


def _new_file(path: str, mode: int) -> int:
    """Create a file that no other process has open, and lock it. Returns its descriptor.

    Raises ValueError if another server writes it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        old = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _lock(old)
            os.unlink(path)  # a helper that was killed has left it
        finally:
            os.close(old)
    file = os.open(path, flags, mode)
    try:
        _lock(file)
    except ValueError:
        os.close(file)
        raise
    return file


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError("another server writes it at the same time; each needs a file of its own") from None
    except OSError:  # a file system without locks
        return


def check_free(disk: os.statvfs_result, byte_size: int) -> None:
    """Raise OSError if a file of this size would leave too little of the disk to other programs.

    Until the new file is complete, the old one takes its place too.
    """
    free = disk.f_bavail * disk.f_frsize
    least = min(_FREE_BYTE_SIZE, disk.f_blocks * disk.f_frsize // _FREE_SHARE)
    if free - byte_size < least:
        more = -(-byte_size >> 20)
        text = (
            f"its disk has {free >> 20} MiB free, too few for {more} MiB more: traces leave {least >> 20} MiB to others"
        )
        raise OSError(errno.ENOSPC, text)
    least = min(_FREE_FILES, disk.f_files // _FREE_SHARE)  # 0 for a file system without a limit
    if disk.f_favail < least:
        text = f"its disk has room for {disk.f_favail} files, and traces leave at least {least} to other programs"
        raise OSError(errno.ENOSPC, text)


def _copy(source: int, target: int, byte_size: int) -> None:
    """Copy the first bytes of a file, in the system if it can do that."""
    position = 0
    while position < byte_size:
        count = os.sendfile(target, source, position, min(_COPY_BYTE_SIZE, byte_size - position))
        if not count:
            raise OSError("the file became shorter while it was copied")
        position += count


#: The most traces that wait.
MAX_WAITING = 16384

#: How long traces wait for others that are written with them, in seconds.
FLUSH_S = 0.25

#: The most traces that are written at a time. Each time costs the kernel about as much as tracing 100 requests, and the
#: helper a copy of the file.
_BATCH = 8192

#: The rest after a file was written, unless the helper is behind: the file is copied to add traces to it.
_REST_FACTOR = 10

#: The largest file.
MAX_FILE_BYTE_SIZE = 256 << 20


class WriteOutcome(msgspec.Struct, frozen=True):
    """What has become of traces that a helper got."""

    lost: int = 0
    #: Why traces were lost, or why no more can be written.
    problem: str = ""
    #: Whether nothing can be written before the settings change.
    stops: bool = False
    #: How long the helper has worked, in seconds; without its start and what it had to do before.
    took_s: float = 0.0


class Destination(Protocol):
    """Where a helper puts traces."""

    #: The name of the helper's function.
    task: str
    #: How long traces wait for others, in seconds; how many are given to the helper at a time, and may wait.
    delay_s: float
    batch: int
    max_waiting: int
    #: The helper rests this many times as long as it has worked, unless it is behind: see `kernel.records.writing`.
    rest_factor: int
    #: Why a trace is lost where `max_waiting` wait.
    full: str

    def arguments(self) -> bytes:
        """Return the arguments of the helper's function in msgpack, but the last one: a list of traces."""

    def done(self, result: bytes) -> WriteOutcome:
        """Take the result of the helper's function."""


class FileDestination:
    """A file. A `Destination`."""

    task = WRITE_TRACES
    delay_s = FLUSH_S
    batch = _BATCH
    max_waiting = MAX_WAITING
    rest_factor = _REST_FACTOR
    full = "too many traces wait to be written"

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def arguments(self) -> bytes:
        return encode_arguments((self._file.path, self._file.kept, None))[:-1]  # `WriteArguments`; None is one byte

    def done(self, result: bytes) -> WriteOutcome:
        written = decode_write_result(result)
        if written.error:
            problem = f"the trace file '{self._file.path}' cannot be written: {written.error}"
            return WriteOutcome(written.lost, problem, stops=True, took_s=written.took_s)
        self._file.kept = written.kept
        if written.kept.byte_size <= MAX_FILE_BYTE_SIZE:
            return WriteOutcome(took_s=written.took_s)
        return WriteOutcome(
            problem=f"the trace file '{self._file.path}' has {written.kept.byte_size >> 20} MiB; to have several "
            "files, set a log frequency (--trace-config triton,log-frequency=N)",
            stops=True,
            took_s=written.took_s,
        )
