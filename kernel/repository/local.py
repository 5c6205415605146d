"""Reads a model repository in a local folder: listings for `layout.py`, configurations and other files.

All functions block, on a local disk for milliseconds, on a hung one perhaps for ever; code on an event loop calls them
with `in_file_thread`. Only regular files are read: a FIFO or a device keeps nobody waiting. Listings omit entries that
are absent or that the process has no permission to read. Other failures raise `InternalError`, or `NoDescriptorLeft`.
"""

from __future__ import annotations

import errno
import os
import stat

from kernel.config.load import MAX_BYTE_SIZE
from kernel.errors import InternalError, file_error
from kernel.file_threads import uses
from kernel.regular_files import read_regular
from kernel.repository.layout import Entry, can_be_model

#: Python writes these folders next to a model's code; they are not part of the model.
_IGNORED = frozenset({"__pycache__"})

#: The entry was removed, is a broken or circular link, is not readable for us, or has an impossible name.
_ABSENT = (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)

#: How many folders may be inside one another. Models have a few, and a listing calls itself for each.
_MAX_DEPTH = 100

#: A folder's device and inode. They identify folders, so that circular links are found.
_Identity = tuple[int, int]


def list_repository(path: str, only: str = "") -> tuple[Entry, ...]:
    """Return the entries of a repository sorted by name, or the one entry called `only`. Follows links.

    Raises `InternalError` if the repository cannot be read.
    """
    if only:
        found = _read(os.path.join(path, only))
        return () if found is None else (found,)
    entry = _read(path)
    if entry is None or not entry.is_folder:
        raise InternalError(f"failed to read model repository '{path}': no such directory")
    return entry.children


def list_names(path: str) -> list[str]:
    """Return the names of the folders in a repository that can be models, sorted. Raises `ServingError`."""
    uses(path)
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and can_be_model(entry.name))
    except OSError as error:
        reason = "no such directory" if error.errno in (*_ABSENT, errno.ENOTDIR) else error.strerror
        raise file_error(f"failed to read model repository '{path}': {reason}", error) from error


def read_file(folder: str, name: str, max_byte_size: int) -> bytes:
    """Return the bytes of the file `name` in `folder`. Follows links.

    Raises `ServingError`, also if it has more than `max_byte_size` bytes.
    """
    path = os.path.join(folder, name)
    uses(path)
    try:
        content = read_regular(path, max_byte_size + 1)
    except OSError as error:
        raise file_error(f"failed to open text file for read {path}: {error.strerror}", error) from None
    if len(content) > max_byte_size:
        raise InternalError(f"failed to read {path}: it has more than {max_byte_size} bytes")
    return content


def read_start(folder: str, name: str, byte_size: int = 256) -> bytes:
    """Return the first bytes of the file `name` in `folder`; none if it cannot be read."""
    path = os.path.join(folder, name)
    uses(path)
    try:
        return read_regular(path, byte_size)
    except OSError:
        return b""


def read_config(path: str) -> bytes:
    """Return the bytes of a configuration file, at most one byte more than `kernel.config.load` accepts."""
    uses(path)
    try:
        return read_regular(path, MAX_BYTE_SIZE + 1)
    except OSError as error:
        raise file_error(f"failed to read '{path}': {error.strerror}", error) from error


def _read(path: str) -> Entry | None:
    try:
        return _entry(path, frozenset())
    except OSError as error:
        raise file_error(f"failed to read '{error.filename}': {error.strerror}", error) from error


def _entry(path: str, parents: frozenset[_Identity]) -> Entry | None:
    """Return the file or folder at `path`, or None; `parents` are all folders above it."""
    uses(path)
    try:
        status = os.stat(path)
        name = os.path.basename(os.path.abspath(path))
        if not stat.S_ISDIR(status.st_mode):
            return Entry(name, modified_ns=status.st_mtime_ns)
        identity = (status.st_dev, status.st_ino)
        if identity in parents:
            return None
        if len(parents) >= _MAX_DEPTH:
            raise InternalError(f"failed to read '{path}': more than {_MAX_DEPTH} folders are inside one another")
        names = sorted(os.listdir(path))
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    inside = (_entry(os.path.join(path, name), parents | {identity}) for name in names if name not in _IGNORED)
    children = tuple(child for child in inside if child is not None)
    # A folder's own time changes only when names are added or removed, which `children` shows as well.
    modified_ns = max((child.modified_ns for child in children), default=status.st_mtime_ns)
    return Entry(name, is_folder=True, modified_ns=modified_ns, children=children)
