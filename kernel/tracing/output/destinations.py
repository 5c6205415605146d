"""Where a helper puts traces: the settings of the queue before it, and the arguments and results of its tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.tracing.output.file_task import WRITE_TRACES, decode_write_result, encode_arguments

if TYPE_CHECKING:
    from kernel.tracing.output.files import TraceFile

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
    #: The helper rests this many times as long as it has worked, unless it is behind: see `kernel.writing.rest`.
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
