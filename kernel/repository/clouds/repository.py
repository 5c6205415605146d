"""A repository in a cloud: lists it, keeps the configurations that it has, and copies models to this machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kernel.config.load import MAX_BYTE_SIZE
from kernel.errors import InternalError, ServingError
from kernel.repository.clouds.copies import Copies, PartialCopy, digest_of
from kernel.repository.clouds.credentials import (
    FILE_VARIABLE,
    BadCredentials,
    Credentials,
    client_arguments,
    parse_credentials,
)
from kernel.repository.clouds.listing import entries_of, files_of
from kernel.repository.clouds.messages import Download, ListFolders, ListObjects, Place, ReadObjects, StoredObject
from kernel.repository.clouds.reader import CloudFailed
from kernel.repository.layout import CONFIG_FILENAME, CONFIGS_FOLDER, Entry, can_be_model
from kernel.texts import limited

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kernel.repository.clouds.address import CloudAddress
    from kernel.repository.clouds.copies import Copy
    from kernel.repository.clouds.reader import CloudReader
    from kernel.repository.layout import ModelFolder

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds for which the names of the models are not asked for again: the repository index is asked for often.
NAMES_AGE_S = 5.0

#: Models that are copied at the same time; each needs a process.
COPIES_AT_ONCE = 4

#: How often a model is copied that changes meanwhile.
_ATTEMPTS = 3

#: Seconds between two lines of the log about a copy that takes long.
_REPORT_S = 10.0

#: Cloud → name of its client in fsspec.
_PROTOCOLS = {"s3": "s3", "gs": "gs", "as": "abfs"}


class CloudRepository:
    """Implements `kernel.repository.repositories.Repository`."""

    def __init__(
        self,
        address: CloudAddress,
        place: Place,
        reader: CloudReader,
        copies: Copies,
        copying: asyncio.Semaphore | None = None,
    ) -> None:
        """`copying` is for the copies that are made at a time; repositories may share it."""
        self.path = str(address)
        self._place = place
        self._reader = reader
        self._copies = copies
        #: Path of a configuration's file → its etag and content, as of the last listing.
        self._configs: dict[str, tuple[str, bytes]] = {}
        #: The names of the models, and why they could not be read, if so; and when that was, in seconds.
        self._names: list[str] = []
        self._names_failure = ""
        self._names_at_s = -math.inf
        #: One asks for the names; others wait for what it gets.
        self._names_lock = asyncio.Lock()
        self._left_out: tuple[str, ...] = ()
        self._copying = copying or asyncio.Semaphore(COPIES_AT_ONCE)

    async def list_entries(self, only: str = "") -> tuple[Entry, ...]:
        """See `Repository`."""
        objects = await self._objects(only)
        entries, left_out = await asyncio.to_thread(entries_of, objects)
        self._warn_of(left_out)
        if only:
            modified_ns = max((entry.modified_ns for entry in entries), default=0)
            entries = (Entry(only, is_folder=True, modified_ns=modified_ns, children=entries),) if entries else ()
        await self._read_configs(entries, only)
        if not only:
            self._know_names([each.name for each in entries if each.is_folder])
        return entries

    async def list_names(self) -> list[str]:
        """See `Repository`. Names of the last `NAMES_AGE_S` seconds are returned again."""
        async with self._names_lock:
            if time.monotonic() - self._names_at_s > NAMES_AGE_S:
                try:
                    found = await self._reader.ask(ListFolders(self._place), list[str])
                    self._know_names(found)
                except CloudFailed as error:
                    self._know_names((), self._failed(error).message)
        if self._names_failure:
            raise InternalError(self._names_failure)
        return self._names

    def read_config(self, path: str) -> bytes | None:
        """Return the content of a configuration that the last listing has read; None for any other path."""
        found = self._configs.get(path)
        return None if found is None else found[1]

    async def copied(self, folder: ModelFolder) -> Copy:
        """Return a copy of a model's files on this machine; the caller releases it.

        Raises `ServingError`; also if the model changes again and again while it is copied.
        """
        async with self._copying:
            return await self._copied(folder)

    # ---- parts of these --------------------------------------------------------------------------

    async def _copied(self, folder: ModelFolder) -> Copy:
        model, copies = folder.entry, self._copies
        begun: PartialCopy | None = None
        try:
            for _ in range(_ATTEMPTS):
                digest = await asyncio.to_thread(digest_of, model)
                found = await _completed(partial(copies.find, self.path, folder.name, digest), _release)
                if found is not None:
                    return found
                # Begun before the former one is abandoned: its files are linked, if they have not changed.
                new = await _completed(partial(copies.begin, self.path, folder.name, model), PartialCopy.abandon)
                former, begun = begun, new
                if former is not None:
                    await asyncio.to_thread(former.abandon)
                await self._download(folder.name, new, len(files_of(model)))
                [now] = await self.list_entries(folder.name) or [Entry(folder.name, is_folder=True)]
                if await asyncio.to_thread(digest_of, now) == digest:
                    return await _completed(partial(new.finish, digest, keep=copies.keeps), _release)
                model = now
        except OSError as error:
            raise InternalError(f"failed to copy model '{folder.name}' to this machine: {error}") from error
        finally:
            if begun is not None:
                await asyncio.to_thread(begun.abandon)
        raise InternalError(f"model '{folder.name}' in '{self.path}' changes while it is copied")

    async def _objects(self, folder: str) -> list[StoredObject]:
        try:
            found: list[StoredObject] = await self._reader.ask(ListObjects(self._place, folder), list[StoredObject])
        except CloudFailed as error:
            raise self._failed(error) from error
        return found

    def _know_names(self, found: Sequence[str], failure: str = "") -> None:
        self._names, self._names_failure = [name for name in found if can_be_model(name)], failure
        self._names_at_s = time.monotonic()

    async def _read_configs(self, entries: tuple[Entry, ...], only: str) -> None:
        """Read the configurations that are new or have changed, and forget those that are gone."""
        found = {
            f"{self.path}/{model.name}/{path}": each.etag
            for model in entries
            for path, each in _config_files(model).items()
            if each.byte_size <= MAX_BYTE_SIZE  # the load says that a longer one is too long
        }
        changed = [path for path, etag in found.items() if self._configs.get(path, ("",))[0] != etag]
        contents: list[bytes] = []
        if changed:
            names = [path.removeprefix(f"{self.path}/") for path in changed]
            try:
                contents = await self._reader.ask(ReadObjects(self._place, names), list[bytes])
            except CloudFailed as error:
                raise self._failed(error) from error
        begin = f"{self.path}/{only}/" if only else self.path
        kept = {path: each for path, each in self._configs.items() if not path.startswith(begin) or path in found}
        self._configs = kept | {path: (found[path], content) for path, content in zip(changed, contents, strict=True)}

    async def _download(self, name: str, copy: PartialCopy, file_count: int) -> None:
        byte_size, begun_s = copy.missing_byte_size, time.monotonic()
        if not copy.missing:
            return
        logger.info(
            "copying model '%s' from %s: %d of %d files, %s",
            name, self.path, len(copy.missing), file_count, _shown(byte_size),
        )  # fmt: skip
        next_report_s = begun_s + _REPORT_S

        def report(received: int) -> None:
            nonlocal next_report_s
            if time.monotonic() >= next_report_s:
                next_report_s = time.monotonic() + _REPORT_S
                logger.info("copying model '%s': %s of %s", name, _shown(received), _shown(byte_size))

        names = {f"{name}/{path}": file for path, file in copy.missing.items()}
        sizes = {f"{name}/{path}": size for path, size in copy.missing_byte_sizes.items()}
        try:
            await self._reader.ask(Download(self._place, names, sizes, copy.incoming), None, report)
        except CloudFailed as error:
            raise InternalError(f"failed to copy model '{name}' from '{self.path}': {error}") from error
        logger.info("copied model '%s' in %.1f s", name, time.monotonic() - begun_s)

    def _warn_of(self, left_out: tuple[str, ...]) -> None:
        if left_out and left_out != self._left_out:
            self._left_out = left_out
            logger.warning(
                "%d objects in %s cannot be files of a repository and are left out, such as '%s'",
                len(left_out), self.path, limited(left_out[0], 200),
            )  # fmt: skip

    def _failed(self, error: CloudFailed) -> InternalError:
        return InternalError(f"failed to read model repository '{self.path}': {error}")


async def _completed(work: Callable[[], _T], undo: Callable[[_T], None]) -> _T:
    """Do `work` in a thread. If the caller is cancelled, wait for it, and undo what it has made."""
    working = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        with contextlib.suppress(ServingError, OSError):
            await asyncio.to_thread(undo, await working)
        raise


def _release(copy: Copy | None) -> None:
    if copy is not None:
        copy.release()


def new_place(address: CloudAddress, environment: Mapping[str, str] = os.environ) -> Place:
    """Return where a repository is and how it is reached. Blocks. Raises `InternalError` for bad credentials."""
    credentials, path = Credentials(), environment.get(FILE_VARIABLE, "")
    if path:
        try:
            credentials = parse_credentials(Path(path).read_bytes())
        except (OSError, BadCredentials) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InternalError(f"failed to read credentials from '{path}' ({FILE_VARIABLE}): {reason}") from None
    return Place(_PROTOCOLS[address.cloud], address.root, client_arguments(address, credentials, environment))


def _config_files(model: Entry) -> dict[str, Entry]:
    """Return path in the model's folder → file, of its configurations."""
    files = {each.name: each for each in model.children if each.name == CONFIG_FILENAME and not each.is_folder}
    configs = model.child(CONFIGS_FOLDER)
    for each in configs.children if configs is not None else ():
        if each.name.endswith(".pbtxt") and not each.is_folder:
            files[f"{CONFIGS_FOLDER}/{each.name}"] = each
    return files


def _shown(byte_size: int) -> str:
    return f"{byte_size / 1e6:,.1f} MB" if byte_size >= 100_000 else f"{byte_size / 1e3:.1f} kB"
