"""How the files of a model come to another host: over the data connection of its worker, before the worker has it.

The agent has a cache of them, each model under the digest of all its files. For each part (the files, and an archive of
an environment that lies elsewhere) the agent says whether it lacks it, the server sends what is lacking, and the agent
checks the digest of each file. All functions block; who ends the connection ends them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backends.environments.cache import CacheTexts, EnvironmentCache
from backends.environments.messages import EnvironmentFailed
from backends.hosts.messages import receive_exactly
from backends.transport.framing import LENGTH
from kernel.errors import Unavailable
from kernel.regular_files import open_regular
from kernel.repository.described_files import digest_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from kernel.repository.described_files import DescribedFile, LaunchDescription

_LACKED, _PRESENT, _TAKEN, _REFUSED = b"+", b"-", b".", b"!"

#: How much is received at once, in bytes.
_PORTION = 1 << 20

#: The longest text of a refusal in bytes.
_MAX_TEXT = 64 << 10

#: How often files are taken again that another process has removed from the cache meanwhile.
_ATTEMPTS = 3

_TEXTS = CacheTexts("copy", "copies of models", "brought to this host", "--cache-directory", "--cache-byte-size")

#: Where the files of a model are in its folder of the cache.
_FILES = "files"


class BroughtFiles(msgspec.Struct, frozen=True):
    """What a worker uses on its host. The descriptors keep it in the cache while one of them is open."""

    folder: str
    #: The archive of an environment that lies outside the model's folder; "" without one.
    archive: str
    locks: list[int]

    def release(self) -> None:
        """Let the cache remove the files."""
        for fd in self.locks:
            os.close(fd)


#: How long the other side may be silent while files are brought, in seconds.
SILENCE_S = 60.0

# ---- the server ------------------------------------------------------------------------------


def send_files(sock: socket.socket, folder: str, description: LaunchDescription, archive: str) -> None:
    """Send the agent what it lacks of the model in `folder`, and of the `archive` of its environment.

    Raises `OSError`, and `Unavailable` if the agent does not take it.
    """
    _send_lacking(sock, {Path(folder, file.name): file for file in description.files})
    elsewhere = None if description.environment is None else description.environment.elsewhere
    if elsewhere is not None:
        _send_lacking(sock, {Path(archive): elsewhere})
    if receive_exactly(sock, 1) != _TAKEN:
        raise _refusal(sock)


def _send_lacking(sock: socket.socket, files: dict[Path, DescribedFile]) -> None:
    said = receive_exactly(sock, 1)
    if said == _REFUSED:
        raise _refusal(sock)
    if said == _PRESENT:
        return
    for path, file in files.items():
        with os.fdopen(open_regular(path), "rb") as opened:
            sent = sock.sendfile(opened, 0, file.byte_size) if file.byte_size else 0
        if sent != file.byte_size:
            raise Unavailable(f"'{path}' has changed while it was brought to another host")


def _refusal(sock: socket.socket) -> Unavailable:
    (length,) = LENGTH.unpack(receive_exactly(sock, LENGTH.size))
    return Unavailable(receive_exactly(sock, min(length, _MAX_TEXT)).decode("utf-8", "replace"))


# ---- the agent -------------------------------------------------------------------------------


def default_cache_folder() -> Path:
    """Return the folder of copies in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "naiad", "models")


class ModelCopies:
    """The cache of one host. Several agents may share it."""

    def __init__(self, folder: Path, byte_size: int) -> None:
        """Make the folder if it is not there. Raises `EnvironmentFailed` with a text for the operator."""
        self._folder = folder
        self._byte_size = byte_size
        self._cache(lambda _: None)

    def _cache(self, say: Callable[[str], None]) -> EnvironmentCache:
        return EnvironmentCache(self._folder, self._byte_size, say, _TEXTS)

    def take(
        self, sock: socket.socket, title: str, version: int, description: LaunchDescription, say: Callable[[str], None]
    ) -> BroughtFiles:
        """Return what a launch needs, after the server has sent what is lacking.

        `say` gets what it waits for. Raises `OSError` if the connection ends, and `Unavailable` for all else, after the
        server got the reason.
        """
        sock.settimeout(SILENCE_S)
        try:
            if digest_of(description.files) != description.digest:
                raise Unavailable(f"the digest of the files of '{title}' is not that of their descriptions")
            for each in description.files:
                if each.byte_size < 0:
                    raise Unavailable(f"'{each.name}' has a size below zero")
            with _kept_locks() as locks:
                folder = self._part(sock, title, description.digest, description.files, say, locks)
                os.makedirs(os.path.join(folder, str(version)), exist_ok=True)
                environment, archive = description.environment, ""
                if environment is not None and (file := environment.elsewhere) is not None:
                    part = self._part(sock, file.name, digest_of((file,)), (file,), say, locks)
                    archive = os.path.join(part, file.name)
                sock.sendall(_TAKEN)
                sock.settimeout(None)  # the worker gets it
                return BroughtFiles(folder, archive, locks)
        except (EnvironmentFailed, Unavailable) as error:
            text = str(error).encode()[:_MAX_TEXT]
            sock.sendall(_REFUSED + LENGTH.pack(len(text)) + text)
            raise Unavailable(str(error)) from None

    def _part(
        self, sock: socket.socket, title: str, digest: str, files: tuple[DescribedFile, ...],
        say: Callable[[str], None], locks: list[int],
    ) -> str:  # fmt: skip
        """Return the folder with `files`. Appends the descriptor that keeps it to `locks`."""
        byte_size = sum(file.byte_size for file in files)
        if byte_size > self._byte_size:
            raise Unavailable(
                f"the files of '{title}' have {byte_size} bytes, more than the cache of the host may have "
                f"({self._byte_size}, --cache-byte-size of naiad agent)"
            )
        connection_error: list[OSError] = []

        def make(folder: Path) -> None:
            sock.sendall(_LACKED)
            say(f"{byte_size} bytes of its files are brought to the host")
            (folder / _FILES).mkdir()
            for file in files:
                _receive_file(sock, folder / _FILES, file)

        for _ in range(_ATTEMPTS):
            made = False

            def make_once(folder: Path) -> None:
                nonlocal made
                made = True
                try:
                    make(folder)
                except (ConnectionError, TimeoutError) as error:  # not of the cache
                    connection_error.append(error)
                    raise

            try:
                cached = self._cache(say).prepare(digest, title, make_once)
            except EnvironmentFailed:
                if connection_error:
                    raise connection_error[0] from None
                raise
            fd = _locked(cached.lock, cached.marker)
            if fd is None:  # another process has removed it
                if made:
                    raise Unavailable(f"the files of '{title}' were removed from the cache of the host at once")
                continue
            locks.append(fd)
            if not made:
                if not _is_whole(cached.folder / _FILES, files):
                    raise Unavailable(
                        f"the copy of '{title}' in '{cached.folder}' was changed: remove this folder of the cache"
                    )
                sock.sendall(_PRESENT)
            return str(cached.folder / _FILES)
        raise Unavailable(f"the files of '{title}' are removed from the cache of the host repeatedly")


@contextlib.contextmanager
def _kept_locks() -> Iterator[list[int]]:
    """Close the descriptors that are in the list if the block raises."""
    locks: list[int] = []
    try:
        yield locks
    except BaseException:
        for fd in locks:
            os.close(fd)
        raise


def _locked(lock: Path, marker: Path) -> int | None:
    """Return the descriptor of a lock that keeps an entry in the cache; None if the entry is gone."""
    fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # others hold it for moments, to see whether they may remove the entry
        os.stat(marker)
    except OSError:
        os.close(fd)
        return None
    return fd


def _is_whole(folder: Path, files: tuple[DescribedFile, ...]) -> bool:
    """Whether all files are there with their sizes. Their content was checked when they came."""
    try:
        return all((folder / file.name).stat().st_size == file.byte_size for file in files)
    except OSError:
        return False


def _receive_file(sock: socket.socket, folder: Path, file: DescribedFile) -> None:
    """Receive one file into the folder. Raises `OSError`, and `Unavailable` for another content."""
    path = folder / file.name
    if os.path.isabs(file.name) or ".." in Path(file.name).parts:
        raise Unavailable(f"'{file.name}' is no name of a file in a model's folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    left, digest = file.byte_size, hashlib.sha256()
    with path.open("xb") as opened:
        while left:
            portion = sock.recv(min(left, _PORTION))
            if not portion:
                raise ConnectionResetError("the connection ended")
            opened.write(portion)
            digest.update(portion)
            left -= len(portion)
    if digest.hexdigest() != file.digest:
        raise Unavailable(f"'{file.name}' has another digest: it has changed while it was brought to the host")
    # All workers of the host use it: none may change it for the others.
    path.chmod(0o555 if file.executable else 0o444)
