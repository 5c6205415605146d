"""In which file each trace is written. Pure.

Triton's rules (tracer.cc): `FILE` if there is no log frequency. With a log frequency of N, each N traces have a file of
their own, `FILE.0`, `FILE.1` and so on; children do not count. Traces that are limited in number have one such file,
too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
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
