"""A repository in a cloud: lists it, keeps the configurations that it has, and copies models to this machine.

The configurations of a cloud repository's models, as of its last listing. Nothing here blocks or waits.

A listing of the whole repository needs them to know the ensembles; loads read the configurations in the copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kernel.background import BackgroundTasks
from kernel.config.load import MAX_BYTE_SIZE
from kernel.errors import InternalError, ServingError
from kernel.file_threads import in_file_thread
from kernel.repository.clouds.copies import Copies, PartialCopy, digest_of
from kernel.repository.clouds.listing import entries_of
from kernel.repository.clouds.messages import ListFolders, ListObjects, Place, ReadObjects, StoredObject
from kernel.repository.clouds.reader import CloudFailed, StoreFailed
from kernel.repository.layout import (
    CONFIGS_FOLDER,
    TRAFFIC_FILENAME,
    Entry,
    can_be_model,
    model_folder,
    without_traffic,
)
from kernel.repository.load_progress import bytes_text
from kernel.repository.path_hints import CONFIG_FILENAME
from kernel.texts import escaped, limited

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kernel.repository.clouds.address import CloudAddress
    from kernel.repository.clouds.copies import Copy
    from kernel.repository.clouds.reader import CloudReader
    from kernel.repository.layout import ModelFolder

#: The most bytes that are asked for together, and the most files.
_PORTION_BYTE_SIZE, _PORTION_FILE_COUNT = 16 << 20, 1000

#: Path in the model's folder → etag and content.
_OfModel = dict[str, tuple[str, bytes]]


class CloudConfigs:
    """Name of a model → its configurations."""

    def __init__(self) -> None:
        self._models: dict[str, _OfModel] = {}

    def content(self, path: str) -> bytes | None:
        """Return the content of a configuration, by its path in the repository; None for what is none."""
        model, _, file = path.partition("/")
        found = self._models.get(model, {}).get(file)
        return None if found is None else found[1]

    def unread(self, models: Iterable[Entry]) -> dict[str, Entry]:
        """Return path in the repository → file, of the configurations that are new or have changed."""
        return {
            f"{model.name}/{path}": each
            for model in models
            for path, each in _config_files(model)
            if self._models.get(model.name, {}).get(path, ("",))[0] != each.etag
        }

    def updated(self, models: Iterable[Entry], read: Mapping[str, bytes | None]) -> dict[str, _OfModel]:
        """Return what `put` gets: the configurations of `models`. `read` has the contents of the unread ones."""
        found: dict[str, _OfModel] = {}
        for model in models:
            known, now = self._models.get(model.name, {}), {}
            for path, each in _config_files(model):
                content = read.get(f"{model.name}/{path}")
                if content is not None:
                    now[path] = (each.etag, content)
                elif known.get(path, ("",))[0] == each.etag:
                    now[path] = known[path]
            if now:
                found[model.name] = now
        return found

    def put(self, updated: dict[str, _OfModel], only: str = "") -> None:
        """Keep the configurations of a listing of the repository, or of the model called `only`."""
        if not only:
            self._models = updated
        elif only in updated:
            self._models[only] = updated[only]
        else:
            self._models.pop(only, None)


def portions(files: Mapping[str, Entry]) -> Iterator[dict[str, Entry]]:
    """Yield `files` in portions that fit into one response."""
    portion: dict[str, Entry] = {}
    byte_size = 0
    for path, each in files.items():
        if portion and (byte_size + each.byte_size > _PORTION_BYTE_SIZE or len(portion) == _PORTION_FILE_COUNT):
            yield portion
            portion, byte_size = {}, 0
        portion[path] = each
        byte_size += each.byte_size
    if portion:
        yield portion


def _config_files(model: Entry) -> Iterator[tuple[str, Entry]]:
    """Yield path in the model's folder and file, of its configurations. The load says that a longer one is too long."""
    for each in model.children:
        if each.is_folder and each.name == CONFIGS_FOLDER:
            for inner in each.children:
                if inner.name.endswith(".pbtxt") and not inner.is_folder and inner.byte_size <= MAX_BYTE_SIZE:
                    yield f"{CONFIGS_FOLDER}/{inner.name}", inner
        elif each.name in (CONFIG_FILENAME, TRAFFIC_FILENAME) and each.byte_size <= MAX_BYTE_SIZE:
            yield each.name, each


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


#: Work that is undone after its caller was cancelled. It takes milliseconds, in a thread.
_background = BackgroundTasks()


def _ignored(received: int, byte_size: int) -> None:
    """Nobody asks how far a copy is."""


class CloudRepository:
    """A folder in a cloud, as `kernel.repository.repositories.LocalRepository` is one of this machine."""

    def __init__(
        self,
        address: CloudAddress,
        place: Place,
        reader: CloudReader,
        copies: Copies,
        copying: asyncio.Semaphore | None = None,
        place_now: Callable[[], Place] | None = None,
    ) -> None:
        """`copying` is for the copies that are made at a time; repositories may share it.

        `place_now` returns the place with the present credentials, if these may change. It blocks.
        """
        self.path = str(address)
        self._place = place
        self._place_now = place_now
        self._reader = reader
        self._copies = copies
        self._configs = CloudConfigs()
        #: The names of the models, and why they could not be read, if so; and when that was, in seconds.
        self._names: list[str] = []
        self._names_failure = ""
        self._names_at_s = -math.inf
        #: One asks for the names; others wait for what it gets.
        self._names_lock = asyncio.Lock()
        self._left_out: tuple[str, ...] = ()
        self._copying = copying or asyncio.Semaphore(COPIES_AT_ONCE)

    async def list_entries(self, only: str = "") -> tuple[Entry, ...]:
        objects = await self._objects(only)
        entries, left_out = await in_file_thread(entries_of, objects)
        self._warn_of(left_out)
        if only:
            modified_ns = max((entry.modified_ns for entry in entries), default=0)
            entries = (Entry(only, is_folder=True, modified_ns=modified_ns, children=entries),) if entries else ()
        await self._read_configs(entries, only)
        if not only:
            self._know_names([each.name for each in entries if each.is_folder])
        return entries

    async def list_names(self) -> list[str]:
        """Return the names of the folders that can be models; those of the last `NAMES_AGE_S` seconds again."""
        async with self._names_lock:
            if time.monotonic() - self._names_at_s > NAMES_AGE_S:
                await self._renew_place()
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
        return self._configs.content(path.removeprefix(f"{self.path}/")) if path.startswith(f"{self.path}/") else None

    async def copied(
        self, folder: ModelFolder, report: Callable[[int, int], None] = _ignored
    ) -> tuple[ModelFolder, Copy]:
        """Return a copy of a model's files on this machine, which the caller releases; and the model as it was copied,
        which is newer than `folder` if it has changed meanwhile.

        `report` gets how many bytes have been received and how many there are, several times a second while they come.
        Raises `ServingError`; also if the model changes again and again while it is copied.
        """
        async with self._copying:
            entry, copy = await self._copied(folder, report)
        return model_folder(self.path, entry, namespacing=bool(folder.namespace)), copy

    # ---- parts of these --------------------------------------------------------------------------

    async def _copied(self, folder: ModelFolder, report: Callable[[int, int], None]) -> tuple[Entry, Copy]:
        model, copies = folder.entry, self._copies
        begun: PartialCopy | None = None
        try:
            for _ in range(_ATTEMPTS):
                digest = await in_file_thread(digest_of, model)
                found = await _completed(partial(copies.find, self.path, folder.name, digest), _release)
                if found is not None:
                    return model, found
                # Begun before the former one is abandoned: its files are linked, if they have not changed.
                new = await _completed(partial(copies.begin, self.path, folder.name, model), PartialCopy.abandon)
                former, begun = begun, new
                if former is not None:
                    await in_file_thread(former.abandon)
                failure = await self._download(folder.name, new, report)
                now = await self._listed_again(folder.name, failure)
                if await in_file_thread(digest_of, now) == digest:
                    if failure is not None:
                        raise failure
                    return now, await _completed(partial(new.finish, digest, keep=copies.keeps), _release)
                model = now
        except OSError as error:
            raise InternalError(f"failed to copy model '{folder.name}' to this machine: {error}") from error
        finally:
            # A whole copy is returned without an `await`: a caller that is cancelled there would lose it.
            if begun is not None and not begun.ended:
                await in_file_thread(begun.abandon)
        raise InternalError(f"model '{folder.name}' in '{self.path}' changes while it is copied")

    async def _listed_again(self, name: str, failure: InternalError | None) -> Entry:
        """Return the listing of a model after its copy, which may have failed because the model was changed."""
        try:
            found = await self.list_entries(name)
        except InternalError as error:
            raise failure or error from None
        if not found:
            raise InternalError(f"model '{name}' was removed from '{self.path}' while it was copied")
        return without_traffic(found[0])

    async def _objects(self, folder: str) -> list[StoredObject]:
        await self._renew_place()
        try:
            found: list[StoredObject] = await self._reader.ask(ListObjects(self._place, folder), list[StoredObject])
        except CloudFailed as error:
            raise self._failed(error) from error
        return found

    async def _renew_place(self) -> None:
        """Use new credentials. Downloads follow a listing."""
        if self._place_now is not None:
            self._place = await in_file_thread(self._place_now)

    def _know_names(self, found: Sequence[str], failure: str = "") -> None:
        self._names, self._names_failure = [name for name in found if can_be_model(name)], failure
        self._names_at_s = time.monotonic()

    async def _read_configs(self, entries: tuple[Entry, ...], only: str) -> None:
        """Read the configurations that are new or have changed, and forget those that are gone."""
        read: dict[str, bytes | None] = {}
        for files in portions(await in_file_thread(self._configs.unread, entries)):
            names, byte_sizes = list(files), [each.byte_size for each in files.values()]
            try:
                request = ReadObjects(self._place, names, byte_sizes)
                contents = await self._reader.ask(request, list[bytes | None])
            except CloudFailed as error:
                raise self._failed(error) from error
            read.update(zip(names, contents, strict=True))
        self._configs.put(await in_file_thread(self._configs.updated, entries, read), only)

    async def _download(self, name: str, copy: PartialCopy, report: Callable[[int, int], None]) -> InternalError | None:
        """Receive what a copy misses. Returns an error that may have its reason in a change of the model.

        Raises other errors.
        """
        byte_size, begun_s = copy.missing_byte_size, time.monotonic()
        if not copy.missing:
            return None
        logger.info(
            "model '%s' is copied from %s: %d of %d files, %s",
            name, self.path, len(copy.missing), copy.file_count, bytes_text(byte_size),
        )  # fmt: skip
        next_line_s = begun_s + _REPORT_S

        def received(count: int) -> None:
            nonlocal next_line_s
            copy.received_byte_size = count
            report(count, byte_size)
            now_s = time.monotonic()
            if now_s >= next_line_s:
                next_line_s = now_s + _REPORT_S
                rate = f"{count / 1e6 / max(now_s - begun_s, 1e-3):,.1f} MB/s"
                logger.info("model '%s' is copied: %s, %s", name, bytes_text(byte_size, count), rate)

        report(0, byte_size)
        request = await in_file_thread(copy.request, self._place)
        try:
            await self._reader.ask(request, None, received)
        except CloudFailed as error:
            failure = InternalError(f"failed to copy model '{name}' from '{self.path}': {error}")
            if not isinstance(error, StoreFailed):
                raise failure from error
            return failure
        report(byte_size, byte_size)
        logger.info("model '%s' was copied in %.1f s", name, time.monotonic() - begun_s)
        return None

    def _warn_of(self, left_out: tuple[str, ...]) -> None:
        if left_out and left_out != self._left_out:
            self._left_out = left_out
            logger.warning(
                "%d objects in %s cannot be files of a repository and are left out, such as '%s'",
                len(left_out), self.path, escaped(limited(left_out[0], 200)),
            )  # fmt: skip

    def _failed(self, error: CloudFailed) -> InternalError:
        return InternalError(f"failed to read model repository '{self.path}': {error}")


async def _completed(work: Callable[[], _T], undo: Callable[[_T], None]) -> _T:
    """Do `work` in a thread. If the caller is cancelled, wait for it, and undo what it has made.

    What is begun ends also if the caller is cancelled again.
    """
    working = asyncio.ensure_future(in_file_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await _background.uncancelled(_undone(working, undo))
        raise


async def _undone(working: asyncio.Future[_T], undo: Callable[[_T], None]) -> None:
    with contextlib.suppress(ServingError, OSError):
        await in_file_thread(undo, await working)


def _release(copy: Copy | None) -> None:
    if copy is not None:
        copy.release()
