"""The folder of environments that the server has made: `KEY/` for each, beside its lock `KEY.lock`.

Servers share it. The process that makes an environment holds its lock exclusively; users share the lock, as a worker
does until it has ended. An environment is complete when it has its marker. When all environments together have too many
bytes, unused ones are removed, those that were not used for the longest time first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from typing import TYPE_CHECKING

import msgspec

from backends.environments.messages import EnvironmentFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: In the folder of an environment, written when it is complete.
MARKER = "naiad-environment.json"

_KEY = re.compile(r"[0-9a-z-]{1,100}", re.ASCII)
_WAIT_S = 0.2

#: How often one that is not there is looked for while others hold its lock for other reasons than to make it.
MOST_LOOKS = 50


class Marker(msgspec.Struct, frozen=True):
    """What is known of a complete environment. The time of its file is that of the last use."""

    #: The file that it was made of, for people who look into the cache.
    source: str
    byte_size: int


class CacheTexts(msgspec.Struct, frozen=True):
    """What errors and lines of the log call the entries of a cache, and the flags that set its folder and its size."""

    one: str = "environment"
    many: str = "environments"
    made: str = "made into an environment"
    folder_flag: str = "--environment-cache-directory"
    size_flag: str = "--environment-cache-byte-size"


_ENVIRONMENTS = CacheTexts()


class CachedEnvironment(msgspec.Struct, frozen=True):
    """The place of one environment."""

    folder: Path

    @property
    def lock(self) -> Path:
        return self.folder.with_name(self.folder.name + ".lock")

    @property
    def marker(self) -> Path:
        return self.folder / MARKER

    def read(self) -> Marker | None:
        """Return the marker; None if the environment is not complete."""
        try:
            return msgspec.json.decode(self.marker.read_bytes(), type=Marker)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None


class EnvironmentCache:
    """The environments in one folder, or with other `texts` other folders. All methods block on the file system."""

    def __init__(
        self, folder: Path, byte_size: int, say: Callable[[str], None], texts: CacheTexts = _ENVIRONMENTS
    ) -> None:
        """Make the folder if it is not there. `say` gets lines for the log. Raises `EnvironmentFailed`."""
        self._texts = texts
        self._folder = folder
        self._byte_size = byte_size
        self._say = say
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            raise EnvironmentFailed(
                f"the folder of {texts.many} cannot be created: {error}. Choose another one with {texts.folder_flag}"
            ) from None
        # Its programs are run, so no other user may write there.
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise EnvironmentFailed(
                f"the folder of {texts.many}, '{folder}', belongs to another user, or others may write to it. Choose "
                f"another one with {texts.folder_flag}"
            )

    def prepare(self, key: str, source: str, make: Callable[[Path], None]) -> CachedEnvironment:
        """Return the environment called `key`. If it is not there, `make` makes it in the folder that it is given.

        Only one process makes it; others wait. Raises `EnvironmentFailed`, also for one that is too large; then nothing
        is left of it.
        """
        assert _KEY.fullmatch(key), f"'{key}' is no name of an environment"
        found = CachedEnvironment(self._folder / key)
        for _ in range(MOST_LOOKS):
            with self._shared(found):  # waits for who makes it
                if found.read() is not None:
                    os.utime(found.marker)
                    return found
            # Who uses it has a shared lock for as long as a worker lives, so this one is only tried.
            with self._free(found) as free:
                if free:
                    if found.read() is None:
                        self._make(found, source, make)
                    return found
            time.sleep(_WAIT_S)
        raise EnvironmentFailed(f"'{found.folder}' was removed while it is used: end the workers that use it")

    def _make(self, found: CachedEnvironment, source: str, make: Callable[[Path], None]) -> None:
        """Make an environment whose lock is held."""
        self._remove_incomplete()
        shutil.rmtree(found.folder, ignore_errors=True)
        try:
            found.folder.mkdir(mode=0o700)
            make(found.folder)
            self._complete(found, source)
        except BaseException as error:
            shutil.rmtree(found.folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise EnvironmentFailed(f"'{source}' could not be {self._texts.made}: {error}") from None
            raise

    @property
    def byte_size(self) -> int:
        """The most bytes of all environments together, and so of each one."""
        return self._byte_size

    def _complete(self, made: CachedEnvironment, source: str) -> None:
        byte_size = folder_byte_size(made.folder)
        if byte_size > self._byte_size:
            raise EnvironmentFailed(too_large(source, self._byte_size, self._texts))
        self._make_room(byte_size, made)
        written = made.folder / (MARKER + ".new")
        written.write_bytes(msgspec.json.encode(Marker(source, byte_size)))
        written.rename(made.marker)

    def _make_room(self, byte_size: int, made: CachedEnvironment) -> None:
        """Remove environments that are not used until there is room for `byte_size` bytes, or none is left."""
        others = [(each, marker) for each in self._all() if each != made and (marker := each.read()) is not None]
        total = byte_size + sum(marker.byte_size for _, marker in others)
        for each, marker in sorted(others, key=lambda entry: _used_at(entry[0])):
            if total <= self._byte_size:
                return
            with self._free(each) as free:
                if free:
                    self._say(
                        f"removing the {self._texts.one} of '{marker.source}', which was not used for the longest time"
                    )
                    each.marker.unlink(missing_ok=True)
                    shutil.rmtree(each.folder, ignore_errors=True)
                    total -= marker.byte_size

    def _remove_incomplete(self) -> None:
        """Remove unfinished environments of servers that were killed."""
        for each in self._all():
            if each.read() is None:
                with self._free(each) as free:
                    if free:
                        shutil.rmtree(each.folder, ignore_errors=True)

    def _all(self) -> list[CachedEnvironment]:
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return [CachedEnvironment(self._folder / name) for name in sorted(names) if _KEY.fullmatch(name)]

    @contextlib.contextmanager
    def _shared(self, environment: CachedEnvironment) -> Iterator[None]:
        """Hold a shared lock of `environment`. Waits for a process that makes it, and says so; the server limits the
        time."""
        with environment.lock.open("a") as file:
            waits = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waits:
                        self._say(f"another process makes the {self._texts.one}; waiting for it")
                    waits = True
                    time.sleep(_WAIT_S)
            yield

    @contextlib.contextmanager
    def _free(self, environment: CachedEnvironment) -> Iterator[bool]:
        """Take the lock of `environment` exclusively if it is free; returns whether it was."""
        with environment.lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True


def too_large(source: str, byte_size: int, texts: CacheTexts = _ENVIRONMENTS) -> str:
    """Return the text for an environment that has more bytes than all of them may have."""
    return (
        f"the {texts.one} of '{source}' has more than {byte_size} bytes, the limit of all {texts.many} "
        f"({texts.size_flag})"
    )


def folder_byte_size(folder: Path) -> int:
    """Return the bytes of all files below `folder`, each of which counts once. Links are not followed."""
    total, seen = 0, set()
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_size
    return total


def _used_at(environment: CachedEnvironment) -> float:
    try:
        return environment.marker.stat().st_mtime
    except OSError:
        return 0
