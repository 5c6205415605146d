"""The task of the helper that writes traces to files, in Triton's JSON."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import TYPE_CHECKING

import msgspec

from kernel.serving.helper_tasks import TaskResult
from kernel.tracing.output.trace_json import trace_json
from kernel.tracing.trace import TraceRecord, UsualTrace  # noqa: TC001 - msgspec reads them

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps

#: The name of the function.
WRITE_TRACES = "traces.write"

#: How much of a file is copied at a time.
_COPY_BYTE_SIZE = 1 << 20


class WriteArguments(msgspec.Struct, array_like=True):
    """Add these traces to the first `kept_byte_size` bytes of the file; 0 for a new file."""

    path: str
    kept_byte_size: int
    records: list[TraceRecord | UsualTrace]


class WriteResult(msgspec.Struct, array_like=True):
    """How many bytes of the file are kept the next time; or why it cannot be written, and how many traces it lacks."""

    kept_byte_size: int = 0
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


def write_traces(wanted: WriteArguments) -> int:
    """Write a new file beside the old one and put it in its place, so that a reader always finds complete JSON.

    Returns how many bytes of it are to be kept the next time. Raises OSError, and ValueError if there is something at
    the path that is not a file; then the old file is unchanged.
    """
    path = os.path.realpath(wanted.path)
    kept = wanted.kept_byte_size
    try:
        found = os.stat(path)
    except FileNotFoundError:
        kept = 0  # the file was moved or removed: begin a new one
    else:
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a file")
        if found.st_size < kept:
            kept = 0
    new = b",\n".join(map(trace_json, wanted.records))
    aside = f"{path}.part"
    try:
        with open(aside, "wb") as file:
            if kept:
                with open(path, "rb") as old:
                    _copy(old.fileno(), file.fileno(), kept)
                file.seek(0, os.SEEK_END)
            file.write((b",\n" if kept else b"[\n") + new)
            size = file.tell()
            file.write(b"\n]\n")
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    return size


def _copy(source: int, target: int, byte_size: int) -> None:
    """Copy the first bytes of a file, in the system if it can do that."""
    position = 0
    while position < byte_size:
        count = os.sendfile(target, source, position, min(_COPY_BYTE_SIZE, byte_size - position))
        if not count:
            raise OSError("the file became shorter while it was copied")
        position += count
