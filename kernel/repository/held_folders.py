"""Folders that are removed with their last use, and temporary folders that outlive no server.

A temporary folder is locked as long as it is used. The lock ends with the process, however that ends, so the next
server can remove what a killed one has left. Everything here blocks on the file system.
"""

from __future__ import annotations

import abc
import fcntl
import os
import shutil
import tempfile
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: The names of the folders in the system's folder for temporary files.
_FOLDER_PREFIX = "naiad-model-"

#: How a folder is opened whose lock is taken.
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class HeldFolder(abc.ABC):
    """A folder with files of a model. The code that makes it holds the first use."""

    def __init__(self) -> None:
        self._use_count = 1
        #: Versions of a model end at the same time, each in a thread.
        self._lock = threading.Lock()

    def retain(self) -> None:
        """Add one use."""
        with self._lock:
            self._use_count += 1

    def release(self) -> None:
        """End one use."""
        with self._lock:
            self._use_count -= 1
            is_unused = not self._use_count
        if is_unused:
            self._remove()

    @abc.abstractmethod
    def _remove(self) -> None:
        """Nobody uses the folder any more."""


def new_locked_folder(prefix: str = _FOLDER_PREFIX, parent: str | None = None) -> tuple[str, int]:
    """Return the path of a new folder, and the descriptor that holds its lock. Raises `OSError`; then there is none.

    The folder is in `parent`, or in the system's folder for temporary files: there `remove_abandoned_folders` removes
    it if this process ends without doing so.
    """
    while True:
        path = os.path.realpath(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            fd = os.open(path, OPEN_FOLDER)
        except FileNotFoundError:  # another server has found the folder without a lock, and removed it
            continue
        except OSError:
            os.rmdir(path)
            raise
        fcntl.flock(fd, fcntl.LOCK_EX)
        if is_at(fd, path):  # see above
            return path, fd
        os.close(fd)


def is_at(fd: int, path: str | Path) -> bool:
    """Whether the open folder is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def remove_abandoned_folders() -> list[str]:
    """Remove the folders of load requests that servers of this user have left which were killed; returns their paths.

    Blocks on the file system. Folders of living servers are locked and stay.
    """
    removed: list[str] = []
    try:
        names = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(_FOLDER_PREFIX)]
    except OSError:  # there is nothing that we could remove
        return removed
    for name in names:
        path = os.path.join(tempfile.gettempdir(), name)
        try:
            fd = os.open(path, OPEN_FOLDER)
        except OSError:  # removed meanwhile, a link, or of another user
            continue
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(fd, path):
                    shutil.rmtree(path)
                    removed.append(path)
        except OSError:  # locked: a living server uses it
            continue
        finally:
            os.close(fd)
    return removed
