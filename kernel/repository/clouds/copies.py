"""Copies of models in a folder of this machine. All functions block on the file system.

ROOT/MODEL-KEY/DIGEST/NAME/...       a whole copy of the model NAME; the digest is of its files' names and etags
ROOT/MODEL-KEY/DIGEST/.objects.json  the etags of its files
ROOT/MODEL-KEY/partial-.../          one that is being made, or was left by a server that was killed
ROOT/MODEL-KEY/partial-.../.incoming files that are being received

Names of models do not begin with a dot.

A copy never changes, so a version that serves can start its workers again while a newer copy is made. Files that the
newer one has as well are not received again but linked. Who uses a folder holds a shared lock of it, who makes one an
exclusive lock; both end with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InternalError, file_error
from kernel.repository.clouds.listing import files_of, folders_of
from kernel.repository.clouds.messages import Download
from kernel.repository.held_folders import OPEN_FOLDER, HeldFolder, is_at, new_locked_folder

if TYPE_CHECKING:
    from kernel.repository.clouds.messages import Place
    from kernel.repository.layout import Entry

#: Bytes of the disk that stay free.
RESERVE_BYTE_SIZE = 1 << 30

_MANIFEST, _INCOMING = ".objects.json", ".incoming"
_PARTIAL = "partial-"


class _Object(msgspec.Struct, frozen=True):
    etag: str
    byte_size: int


class Copy(HeldFolder):
    """A whole copy that is used, with its lock. Unless copies are kept, it is removed with its last use."""

    def __init__(self, folder: Path, name: str, fd: int, *, keep: bool) -> None:
        """`fd` is the open folder with a shared lock. It is the copy's now."""
        super().__init__()
        self._folder = folder
        self.path = str(folder / name)
        self.fd = fd
        self._keep = keep

    def _remove(self) -> None:
        if not self._keep:
            remove_unused(self._folder, self.fd)
        os.close(self.fd)


class PartialCopy:
    """A copy that is being made. `finish` or `abandon` follows; after one of them, `abandon` does nothing."""

    def __init__(self, folder: Path, fd: int, name: str, objects: dict[str, _Object]) -> None:
        """`fd` is the open folder with an exclusive lock."""
        self._folder = folder
        self.fd = fd
        self._name = name
        self._objects = objects
        #: The folder for files that are being received: they are moved when they are whole.
        self.incoming = str(folder / _INCOMING)
        #: Object → path of the file that is still to be received.
        self.missing = {path: str(folder / name / path) for path in objects}
        #: How many bytes of these are here, as far as is known.
        self.received_byte_size = 0

    @property
    def ended(self) -> bool:
        """Whether it has become a copy, or was abandoned."""
        return self.fd < 0

    @property
    def file_count(self) -> int:
        """How many files the copy will have."""
        return len(self._objects)

    @property
    def missing_byte_size(self) -> int:
        """How many bytes are to be received, or were when it began."""
        return sum(self._objects[path].byte_size for path in self.missing)

    @property
    def coming_byte_size(self) -> int:
        """How many bytes the copy will still take of the disk."""
        return 0 if self.ended else max(self.missing_byte_size - self.received_byte_size, 0)

    def request(self, place: Place) -> Download:
        """Return the request for what is missing. `place` is the repository."""
        names = {f"{self._name}/{path}": file for path, file in self.missing.items()}
        sizes = {f"{self._name}/{path}": self._objects[path].byte_size for path in self.missing}
        return Download(place, names, sizes, self.incoming)

    def fill(self, model: Entry) -> None:
        """Make the folders, and link files that another copy of the model has."""
        (self._folder / _INCOMING).mkdir()
        (self._folder / self._name).mkdir()
        for path in folders_of(model):
            (self._folder / self._name / path).mkdir()
        (self._folder / _MANIFEST).write_bytes(msgspec.json.encode(self._objects))
        for other in self._folder.parent.iterdir():
            if self.missing and other != self._folder:
                self._link(other)

    def _link(self, other: Path) -> None:
        """Link the files of another copy that are the same here. It may be removed meanwhile."""
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            theirs = msgspec.json.decode((other / _MANIFEST).read_bytes(), type=dict[str, _Object])
            for path in [path for path in self.missing if theirs.get(path) == self._objects[path]]:
                file = other / self._name / path
                if file.is_file() and file.stat().st_size == theirs[path].byte_size:
                    os.link(file, self.missing[path])
                    del self.missing[path]

    def check_room(self, promised_byte_size: int) -> None:
        """Raise `InternalError` if the disk has no room for what is missing. Some of it is promised to other copies."""
        free = shutil.disk_usage(self._folder).free
        if self.missing_byte_size > max(free - promised_byte_size - RESERVE_BYTE_SIZE, 0):
            others = f", {promised_byte_size} are for other models that are being copied" if promised_byte_size else ""
            raise InternalError(
                f"the model's files need {self.missing_byte_size} bytes more in '{self._folder.parent.parent}', whose "
                f"disk has {free} free{others}; {RESERVE_BYTE_SIZE} of them stay free"
            )

    def finish(self, digest: str, *, keep: bool) -> Copy:
        """All files are there: let the copy be found. With `keep` it outlives the machine's end, too."""
        (self._folder / _INCOMING).rmdir()
        for path in self._objects:
            file = self._folder / self._name / path
            file.chmod(0o444)
            if keep:
                _sync(file)
        whole = self._folder.parent / digest
        with contextlib.suppress(OSError):  # another server has made the same copy
            self._folder.rename(whole)
        fcntl.flock(self.fd, fcntl.LOCK_SH)
        if is_at(self.fd, whole):
            fd, self.fd = self.fd, -1
            return Copy(whole, self._name, fd, keep=keep)
        self.abandon()
        found = _opened(whole, self._name, keep=keep)
        if found is None:
            raise InternalError(f"the copy '{whole}' was removed while it was made")
        return found

    def abandon(self) -> None:
        """Remove it."""
        if self.fd >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self.fd)
            self.fd = -1


class Copies:
    """The folder of all copies of a server."""

    def __init__(self, root: str = "") -> None:
        """Without `root` copies are in a temporary folder, and are removed with their last use."""
        self.keeps = bool(root)
        self._root = root
        self._temporary: tuple[str, int] | None = None
        #: The copies that are being made.
        self._partial: list[PartialCopy] = []
        #: Models are copied in several threads.
        self._lock = threading.Lock()

    def find(self, address: str, name: str, digest: str) -> Copy | None:
        """Return the whole copy with this digest of the model `name` at `address`, or None. Raises `ServingError`.

        Then copies that nobody uses are removed.
        """
        try:
            folder = self._of_model(address, name)
            found = _opened(folder / digest, name, keep=self.keeps)
            if found is not None and self.keeps:
                self.remove_old(folder)  # such as what a killed server has received
            return found
        except OSError as error:
            raise file_error(f"failed to find copies of model '{name}': {error.strerror}", error) from error

    def begin(self, address: str, name: str, model: Entry) -> PartialCopy:
        """Begin a copy of the files of `model`, and remove copies that nobody uses. Raises `ServingError`."""
        try:
            folder = self._of_model(address, name)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path, fd = new_locked_folder(_PARTIAL, str(folder))
            objects = {path: _Object(each.etag, each.byte_size) for path, each in files_of(model).items()}
            partial = PartialCopy(Path(path), fd, name, objects)
            try:
                partial.fill(model)
                self.remove_old(folder)
                with self._lock:
                    self._partial = [each for each in self._partial if each.coming_byte_size]
                    partial.check_room(sum(each.coming_byte_size for each in self._partial))
                    self._partial.append(partial)
            except BaseException:
                partial.abandon()
                raise
        except OSError as error:
            raise file_error(f"failed to copy model '{name}' to this machine: {error}", error) from error
        return partial

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._temporary is not None:
            path, fd = self._temporary
            self._temporary = None
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)

    def remove_old(self, folder: Path) -> None:
        """Remove the copies of a model that no server uses or makes; their files that are needed have links."""
        for other in folder.iterdir():
            with contextlib.suppress(OSError):
                fd = os.open(other, OPEN_FOLDER)
                try:
                    remove_unused(other, fd)
                finally:
                    os.close(fd)

    def _of_model(self, address: str, name: str) -> Path:
        if self._root:
            root = self._root
        else:
            with self._lock:
                self._temporary = self._temporary or new_locked_folder()
            root = self._temporary[0]
        shown = re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)[:60]
        return Path(root) / f"{shown}-{hashlib.sha256(f'{address}/{name}'.encode()).hexdigest()[:16]}"


def digest_of(model: Entry) -> str:
    """Return what identifies the files of a model."""
    files = {path: (entry.etag, entry.byte_size) for path, entry in files_of(model).items()}
    return hashlib.sha256(msgspec.json.encode([sorted(files.items()), folders_of(model)])).hexdigest()[:32]


def _opened(folder: Path, name: str, *, keep: bool) -> Copy | None:
    """Return the copy in `folder` if it is there and whole."""
    try:
        fd = os.open(folder, OPEN_FOLDER)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a lock is exclusive only while the folder is removed
        objects = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=dict[str, _Object])
        whole = is_at(fd, folder) and all(
            (folder / name / path).stat().st_size == each.byte_size for path, each in objects.items()
        )
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        whole = False
    if not whole:
        remove_unused(folder, fd)
        os.close(fd)
        return None
    return Copy(folder, name, fd, keep=keep)


def remove_unused(folder: Path, fd: int) -> None:
    """Remove an open folder, unless another use of it has a lock, or another folder has its name now."""
    with contextlib.suppress(OSError):  # it is used
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(fd, folder):
            shutil.rmtree(folder, ignore_errors=True)


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
