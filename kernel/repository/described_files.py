"""What a worker needs of the files of this machine, described so that another host can fetch it: names and digests.

Only a launcher for other hosts asks for it. A launch on this machine uses the paths of `WorkerNeeds`, and nothing here
is read. Names are relative to the model's folder, so a host may have that folder anywhere (`Launched.folder`).
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import Unavailable, Unsupported
from kernel.regular_files import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedReader

    from kernel.repository.execution_environment import ExecutionEnvironment
    from kernel.repository.worker_needs import WorkerNeeds

#: The most files of one model.
MAX_FILES = 100_000

#: How old the times of a file must be before its digest is remembered, in nanoseconds.
_SETTLED_NS = 2_000_000_000


class DescribedFile(msgspec.Struct, frozen=True):
    """One file. Files with the same digest have the same content, whatever host they are on."""

    #: Relative to the model's folder, with `/` between folders. Of an environment elsewhere only the file's own name.
    name: str
    byte_size: int
    #: SHA-256 of the content, in hexadecimal.
    digest: str
    executable: bool = False


class DescribedEnvironment(msgspec.Struct, frozen=True):
    """An environment of a model's own: an archive, or a file of requirements. One of the two names is set."""

    #: The name of the archive, or of a folder of the model with an unpacked environment.
    archive: str = ""
    requirements: str = ""
    #: The archive, if it does not lie in the model's folder: its files do not have it then.
    elsewhere: DescribedFile | None = None


class LaunchDescription(msgspec.Struct, frozen=True):
    """All files that the worker of a model version needs, and how it is started."""

    #: In the order of their names.
    files: tuple[DescribedFile, ...]
    #: SHA-256 of the names, sizes and digests of `files`: a host that has files of this digest need not fetch them.
    digest: str
    #: Modules to import before the model is loaded, and the name of a file to run then; "" for none.
    preload_modules: tuple[str, ...] = ()
    preload_file: str = ""
    environment: DescribedEnvironment | None = None


def digest_of(files: tuple[DescribedFile, ...]) -> str:
    """Return the digest of `LaunchDescription.digest`."""
    return hashlib.sha256(msgspec.json.encode(files)).hexdigest()


class FileDigests:
    """Digests of files that have not changed since they were read. Bounded. Several threads may use it."""

    def __init__(self, most: int = 20_000, now_ns: Callable[[], int] = time.time_ns) -> None:
        """Remembers those of the `most` files that were last asked for. `now_ns` is the clock of the file system."""
        self._most = most
        self._now_ns = now_ns
        self._lock = threading.Lock()
        #: By what the system says of a file. The last ones were asked for last.
        self._digests: dict[tuple[object, ...], str] = {}

    def digest(self, file: BufferedReader, path: str) -> str:
        """Return the digest of an open file. Reads it if it may have changed. Raises `OSError`."""
        key = _identity(path, os.fstat(file.fileno()))
        with self._lock:
            found = self._digests.pop(key, None)
            if found is not None:
                self._digests[key] = found
                return found
        found = hashlib.file_digest(file, "sha256").hexdigest()
        status = os.fstat(file.fileno())
        # Times of files have steps: one that has just changed may change once more and keep its time.
        settled = self._now_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS
        if settled and _identity(path, status) == key:
            with self._lock:
                self._digests[key] = found
                if len(self._digests) > self._most:
                    del self._digests[next(iter(self._digests))]
        return found


def _identity(path: str, status: os.stat_result) -> tuple[object, ...]:
    return path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def describe_launch(needs: WorkerNeeds, digests: FileDigests | None = None) -> LaunchDescription:
    """Return the description of what a worker with these needs has. Blocks: reads the files that `digests` lack.

    The folders of other versions are left out. Links are followed, so the description has what they lead to. Raises
    `Unavailable` if a file cannot be read, and `Unsupported` for what cannot be brought to another host.
    """
    digests = digests or FileDigests()
    try:
        names = list(_names(needs.folder, needs.version))
        files = tuple(_described(os.path.join(needs.folder, name), name, digests) for name in sorted(names))
        environment = None if needs.environment is None else _environment(needs.environment, needs.folder, digests)
    except OSError as error:
        raise Unavailable(f"'{error.filename or needs.folder}' cannot be read: {error.strerror}") from error
    return LaunchDescription(
        files,
        digest_of(files),
        needs.preload.modules,
        _relative(needs.preload.file, needs.folder) if needs.preload.file else "",
        environment,
    )


def _names(folder: str, version: int) -> Iterator[str]:
    """Return the names of the files in the model's folder, without other versions. Raises `OSError`, `Unsupported`."""
    left: list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(folder),))]
    count = 0
    while left:
        prefix, above = left.pop()
        with os.scandir(os.path.join(folder, prefix)) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.name == "__pycache__":  # Python makes another one where the copy is
                    continue
                if not entry.is_dir():
                    count += 1
                    if count > MAX_FILES:
                        raise Unsupported(f"the folder '{folder}' has more than {MAX_FILES} files")
                    yield name
                elif prefix or not _is_version(entry.name) or int(entry.name) == version:
                    real = os.path.realpath(entry.path)
                    if real in above:
                        raise Unsupported(f"the link '{entry.path}' leads to a folder that it is in")
                    left.append((f"{name}/", (*above, real)))


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _described(path: str, name: str, digests: FileDigests) -> DescribedFile:
    """Return the description of a file. Raises `OSError`."""
    fd = open_regular(path)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        digest = digests.digest(file, path)
    return DescribedFile(name, status.st_size, digest, bool(status.st_mode & 0o100))


def _environment(environment: ExecutionEnvironment, folder: str, digests: FileDigests) -> DescribedEnvironment:
    """Return the description of an environment. Raises `OSError` and `Unsupported`."""
    if environment.requirements:
        return DescribedEnvironment(requirements=_relative(environment.requirements, folder))
    path = environment.path
    if _is_within(path, folder):
        return DescribedEnvironment(_relative(path, folder))
    if os.path.isdir(path):
        raise Unsupported(
            f"the environment '{path}' is a folder outside the model's, and its paths are those of this machine; an "
            "archive of it (conda-pack) can be brought to another host"
        )
    return DescribedEnvironment(os.path.basename(path), elsewhere=_described(path, os.path.basename(path), digests))


def _is_within(path: str, folder: str) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _relative(path: str, folder: str) -> str:
    """Return the name of a file of the model. Raises `Unsupported` for one that is elsewhere."""
    if not _is_within(path, folder):
        raise Unsupported(f"'{path}' is not in the model's folder '{folder}'")
    return Path(os.path.abspath(path)).relative_to(os.path.abspath(folder)).as_posix()
