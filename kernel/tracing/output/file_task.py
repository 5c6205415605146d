"""The task of the helper that writes traces to files, in Triton's JSON."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from typing import TYPE_CHECKING

import msgspec

from kernel.serving.helper_tasks import TaskResult
from kernel.tracing.output.files import KeptPart
from kernel.tracing.output.trace_json import trace_json
from kernel.tracing.trace import TraceRecord, UsualTrace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps

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
