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
    from kernel.tracing.trace import TraceRecord, UsualTrace


_UNLIMITED = 1 << 62


class TraceFile(msgspec.Struct, eq=False):
    """A file that is being written."""

    path: str
    #: How many of its bytes are kept when traces are added: all but its end.
    kept_byte_size: int = 0


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
        self.indexed = values.log_frequency > 0 or values.trace_count >= 0
        #: How many more traces of clients' requests the present file takes; 0 before the first file.
        self.room = 0
        self._file: TraceFile | None = None

    def shared_file(self) -> TraceFile:
        """Return the file of all traces without an index."""
        return self._files.shared(self._path)

    def next_file(self) -> TraceFile:
        """Return a new file with the next index."""
        self.room = self._frequency or _UNLIMITED
        self._file = self._files.next(self._path)
        return self._file

    def file_of(self, record: TraceRecord | UsualTrace) -> TraceFile:
        """Return the file for the next trace."""
        if not self.indexed:
            return self.shared_file()
        file = self._file
        if file is None or not self.room:
            file = self.next_file()
        self.room -= not record.parent_id
        return file
