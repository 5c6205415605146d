"""Unpacks an archive of an environment, as conda-pack makes them, so that no path leaves the target folder.

Files and folders come first, links last: while files are written, no link exists through which one could be written
elsewhere. A link must name a place in the target folder. Devices and pipes are refused.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import stat
import tarfile
import time
import zipfile
import zlib
from typing import IO, TYPE_CHECKING

import msgspec

from backends.environments.messages import EnvironmentFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: The most entries of an archive. Large environments have about 200,000.
MAX_ENTRIES = 2_000_000

_COPY_BYTE_SIZE = 1 << 20


class ArchiveEntry(msgspec.Struct, frozen=True):
    """A file, a folder or a link of an archive."""

    #: Relative, without `.` and `..`; "" for the archive's own folder.
    name: str
    #: file, folder, link (symbolic), or same (another name of a file that came before).
    kind: str
    mode: int = 0o644
    modified_s: float = 0
    #: What a link names; for `same` the name of the file.
    target: str = ""


def safe_name(name: str) -> str:
    """Return the name of an entry without needless parts. Raises `EnvironmentFailed` if it leaves the target. Pure."""
    found = posixpath.normpath(name) if name else ""
    if found in (".", ""):
        return ""
    if found.startswith(("/", "../")) or found == ".." or "\0" in found:
        raise EnvironmentFailed(f"the archive has an entry '{name}', which leaves its folder")
    return found


def check_link(name: str, target: str) -> None:
    """Raise `EnvironmentFailed` unless the symbolic link `name` names a place in the target folder. Pure."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if not target or target.startswith("/") or "\0" in target or found == ".." or found.startswith("../"):
        raise EnvironmentFailed(f"the archive has a link '{name}' to '{target}', which leaves its folder")


def unpack(archive: Path, folder: Path, max_byte_size: int, too_large: str, say: Callable[[str], None]) -> None:
    """Unpack `archive` into the empty `folder`. What was written before an error stays.

    Raises `OSError`, and `EnvironmentFailed`: with the text `too_large` above `max_byte_size`.
    """
    target = _Target(folder, max_byte_size, too_large, say)
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                for entry, content in _zip_entries(opened):
                    target.add(entry, content)
        else:
            with tarfile.open(archive, "r:*") as opened_tar:
                for entry, content in _tar_entries(opened_tar):
                    target.add(entry, content)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise EnvironmentFailed(
            f"'{archive}' is not an archive that can be read (.tar.gz, .tar.bz2, .tar.xz, .tar or .zip): {error}"
        ) from None
    target.finish()


def _tar_entries(opened: tarfile.TarFile) -> Iterator[tuple[ArchiveEntry, IO[bytes] | None]]:
    for member in opened:
        name = safe_name(member.name)
        if member.isdir():
            yield ArchiveEntry(name, "folder"), None
        elif member.isreg():
            yield ArchiveEntry(name, "file", member.mode, member.mtime), opened.extractfile(member)
        elif member.issym():
            yield ArchiveEntry(name, "link", target=member.linkname), None
        elif member.islnk():
            yield ArchiveEntry(name, "same", target=safe_name(member.linkname)), None
        else:
            raise EnvironmentFailed(f"the archive has an entry '{member.name}' that is not a file, folder or link")


def _zip_entries(opened: zipfile.ZipFile) -> Iterator[tuple[ArchiveEntry, IO[bytes] | None]]:
    for member in opened.infolist():
        name, mode = safe_name(member.filename), member.external_attr >> 16
        if member.is_dir():
            yield ArchiveEntry(name, "folder"), None
        elif stat.S_ISLNK(mode):
            if member.file_size > os.pathconf("/", "PC_PATH_MAX"):
                raise EnvironmentFailed(f"the archive has a link '{name}' that is too long")
            yield ArchiveEntry(name, "link", target=os.fsdecode(opened.read(member))), None
        else:
            modified = time.mktime((*member.date_time, 0, 0, -1))
            with opened.open(member) as content:
                yield ArchiveEntry(name, "file", stat.S_IMODE(mode) or 0o644, modified), content


class _Target:
    """The folder that an archive is unpacked into."""

    def __init__(self, folder: Path, max_byte_size: int, too_large: str, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._left = max_byte_size
        self._too_large = too_large
        self._say = say
        self._count = 0
        self._links: dict[str, str] = {}

    def add(self, entry: ArchiveEntry, content: IO[bytes] | None) -> None:
        """Write a file or a folder, and keep a link for `finish`."""
        self._count += 1
        if self._count > MAX_ENTRIES:
            raise EnvironmentFailed(f"the archive has more than {MAX_ENTRIES} entries")
        if self._count % 1000 == 0:
            self._say(f"unpacked {self._count} files")
        if not entry.name:
            return
        path = self._folder / entry.name
        if entry.kind == "folder":
            path.mkdir(parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.kind == "link":
            check_link(entry.name, entry.target)
            self._links[entry.name] = entry.target
        elif entry.kind == "same" and entry.target in self._links:
            self._links[entry.name] = posixpath.relpath(
                posixpath.join(posixpath.dirname(entry.target), self._links[entry.target]),
                posixpath.dirname(entry.name) or ".",
            )
        elif entry.kind == "same":
            path.unlink(missing_ok=True)
            os.link(self._folder / entry.target, path, follow_symlinks=False)
        else:
            assert content is not None, "a file has a content"
            self._write(path, entry, content)

    def _write(self, path: Path, entry: ArchiveEntry, content: IO[bytes]) -> None:
        path.unlink(missing_ok=True)  # a name that comes twice must not change the other names of the first file
        with path.open("xb") as file:
            while data := content.read(min(_COPY_BYTE_SIZE, self._left + 1)):
                self._left -= len(data)
                if self._left < 0:
                    raise EnvironmentFailed(self._too_large)
                file.write(data)
        # Without the bits that would run the file as another user.
        path.chmod((entry.mode & 0o777) | stat.S_IRUSR | stat.S_IWUSR)
        os.utime(path, (entry.modified_s, entry.modified_s))  # compiled modules name the time of their source

    def finish(self) -> None:
        """Make the links. One that leads out of the folder through another one is refused."""
        root = os.path.realpath(self._folder)
        for name, target in self._links.items():
            path = self._folder / name
            if os.path.realpath(path.parent) != os.path.join(root, posixpath.dirname(name)).rstrip("/"):
                raise EnvironmentFailed(f"the archive has a link '{name}' in a folder that is a link")
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            path.symlink_to(target)
        for name in self._links:
            found = os.path.realpath(self._folder / name)
            if found != root and not found.startswith(root + "/"):
                raise EnvironmentFailed(f"the archive has a link '{name}', which leaves its folder through another one")
