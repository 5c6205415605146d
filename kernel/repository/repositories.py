"""The model repositories of a server: folders of this machine, and folders in clouds.

`RepositoryListing` lists them and puts the names of the models into the catalog. `TrafficFiles` reads the traffic rules
beside the configurations, which load nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kernel.background import BackgroundTasks
from kernel.errors import InternalError, ServingError
from kernel.file_threads import in_file_thread
from kernel.repository.clouds.address import is_address
from kernel.repository.layout import RepositoryContents, find_models, known_names
from kernel.repository.local import list_names, list_repository, read_config

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kernel.repository.clouds.address import CloudAddress
    from kernel.repository.clouds.copies import Copy
    from kernel.repository.clouds.reader import CloudReader
    from kernel.repository.clouds.repository import CloudRepository
    from kernel.repository.layout import Entry, ModelFolder, TrafficFile
    from kernel.repository.settings import LifecycleSettings
    from kernel.serving.catalog import Catalog


#: Triton's names of the folder for copies, one for each cloud. Here one folder is for all.
_MOUNT_VARIABLES = ("TRITON_AWS_MOUNT_DIRECTORY", "TRITON_GCS_MOUNT_DIRECTORY", "TRITON_AZURE_MOUNT_DIRECTORY")


#: How long a poll waits for the listing of a repository, in seconds. One that takes longer goes on meanwhile, and the
#: models of that repository stay as they are.
LISTING_WAIT_S = 5.0

#: How long the end of the server waits for the removal of copies, in seconds.
_CLOSE_S = 10.0


class LocalRepository:
    """A folder of this machine. `CloudRepository` has the same methods."""

    def __init__(self, path: Path) -> None:
        #: As it is shown.
        self.path = str(path)

    async def list_entries(self, only: str = "") -> tuple[Entry, ...]:
        """Return the entries sorted by name, or the one entry called `only`. Raises `ServingError`."""
        return await in_file_thread(list_repository, self.path, only)

    async def list_names(self) -> list[str]:
        """Return the names of the folders that can be models, sorted. Raises `ServingError`."""
        return await in_file_thread(list_names, self.path)


class _Polled:
    """A repository, and what polls know of it."""

    def __init__(self, repository: LocalRepository | CloudRepository, background: BackgroundTasks) -> None:
        self.repository = repository
        self._background = background
        #: The entries of the last listing that has succeeded; None before there is one.
        self.entries: tuple[Entry, ...] | None = None
        #: Why the listing that has ended last has failed; None if it has not.
        self.error: ServingError | None = None
        #: The listing that runs, and since when (of the monotonic clock).
        self.listing: asyncio.Task[None] | None = None
        self.since_s = 0.0

    def begin(self) -> asyncio.Task[None]:
        """List the repository, unless that is still being done. Returns what ends with the listing."""
        if self.listing is None:
            self.since_s = time.monotonic()
            self.listing = self._background.start(self._list())
            self.listing.add_done_callback(self._ended)
        return self.listing

    async def _list(self) -> None:
        try:
            self.entries = await self.repository.list_entries()
        except ServingError as error:
            self.error = error
        else:
            self.error = None

    def _ended(self, listing: asyncio.Task[None]) -> None:
        self.listing = None


class Repositories:
    """All repositories. `close` ends what they use."""

    def __init__(self, paths: Sequence[Path | CloudAddress], *, copies: str = "", namespacing: bool = False) -> None:
        """Copies of models from clouds are in the folder `copies`, and stay there; in a temporary one if it is empty.

        Raises `InternalError` if credentials of clouds cannot be read.
        """
        self._namespacing = namespacing
        self.repositories: list[LocalRepository | CloudRepository] = []
        self._polled: list[_Polled] = []
        self._listings = BackgroundTasks()
        self._clouds: _Clouds | None = None
        #: Called while a model is copied: its identifier, how many bytes were received, and how many there are.
        self.on_copying: Callable[[str, int, int], None] = lambda identifier, received, byte_size: None
        for path in paths:
            if isinstance(path, Path):
                self.add(LocalRepository(path))
            else:
                self._clouds = self._clouds or _Clouds(copies)
                self.add(self._clouds.repository(path))

    def add(self, repository: LocalRepository | CloudRepository) -> None:
        """Add one more, before the first listing."""
        self.repositories.append(repository)
        self._polled.append(_Polled(repository, self._listings))

    @classmethod
    def of(cls, settings: LifecycleSettings, on_copying: Callable[[str, int, int], None]) -> Repositories:
        """Return the repositories of a server. Raises `InternalError` as the constructor."""
        repositories = cls(settings.repositories, copies=settings.copies, namespacing=settings.namespacing)
        repositories.on_copying = on_copying
        return repositories

    async def scan(self, only: str = "") -> RepositoryContents:
        """List the repositories, or only the model called `only` in each. Raises `ServingError`."""
        listings = await self.listings(only)
        if only:
            return find_models(listings, namespacing=self._namespacing)
        # Of thousands of models this takes too long for the event loop.
        return await in_file_thread(find_models, listings, namespacing=self._namespacing)

    async def poll(self) -> tuple[RepositoryContents, ServingError | None]:
        """List each repository on its own, and return the last listings with the first error of one, if any.

        One that cannot be listed, or takes more than `LISTING_WAIT_S`, keeps nobody waiting: its last listing counts.
        Raises the error of one that was never listed.
        """
        if not self._polled:
            return find_models({}), None
        listings = [each.begin() for each in self._polled]
        await asyncio.wait(listings, timeout=LISTING_WAIT_S)
        known: dict[str, tuple[Entry, ...]] = {}
        for each, listing in zip(self._polled, listings, strict=True):
            if each.entries is None:  # what it has must not look as if it were gone
                await asyncio.wait([listing])
            if listing.done():
                listing.result()  # raises what nobody expects
            if each.entries is None:
                raise each.error or InternalError(f"failed to read model repository '{each.repository.path}'")
            known[each.repository.path] = each.entries
        error = next((each.error for each in self._polled if each.error is not None), None)
        return await in_file_thread(find_models, known, namespacing=self._namespacing), error

    def slowest_listing(self) -> tuple[float, str] | None:
        """Return since when (of the monotonic clock) a listing of a poll runs, and of which repository: the oldest."""
        running = ((each.since_s, each.repository.path) for each in self._polled if each.listing is not None)
        return min(running, default=None)

    async def listings(self, only: str = "") -> dict[str, tuple[Entry, ...]]:
        """Return the entries of each repository, or of the model called `only` in each. Raises `ServingError`."""
        found: dict[str, tuple[Entry, ...]] = {}
        for each in self._polled:
            entries = found[each.repository.path] = await each.repository.list_entries(only)
            if not only:
                each.entries = entries
        return found

    async def names(self) -> tuple[dict[str, str], set[str]]:
        """Return identifier → name of the models, and the duplicate identifiers. Raises `ServingError`."""
        listings = {each.path: await each.list_names() for each in self.repositories}
        return known_names(listings, namespacing=self._namespacing)

    def read_config(self, path: str) -> bytes:
        """Return the content of a configuration that a scan has found; empty for one in a cloud that is too long.

        Blocks. Raises `ServingError`.
        """
        if not is_address(path):
            return read_config(path)
        found = (each.read_config(path) for each in self.repositories if not isinstance(each, LocalRepository))
        return next((content for content in found if content is not None), b"")

    async def copied(self, folder: ModelFolder) -> tuple[ModelFolder, Copy | None]:
        """Return a copy on this machine of a model in a cloud, which the caller releases; None for a local model.

        And the model as it was copied: it may have changed since `folder` was listed. Raises `ServingError`.
        """
        for each in self.repositories:
            if not isinstance(each, LocalRepository) and folder.path == f"{each.path}/{folder.name}":
                return await each.copied(folder, partial(self.on_copying, folder.identifier))
        return folder, None

    async def close(self) -> None:
        """End processes that read clouds, and remove the copies of models unless they are kept."""
        await self._listings.close()
        if self._clouds is not None:
            await self._clouds.close()


class _Clouds:
    """What repositories in clouds share. Few servers have one: the modules are imported here."""

    def __init__(self, copies: str) -> None:
        from kernel.repository.clouds.copies import Copies
        from kernel.repository.clouds.reader import ReaderProcesses
        from kernel.repository.clouds.repository import COPIES_AT_ONCE

        self._reader: CloudReader = ReaderProcesses()
        mounted = (os.environ.get(name, "") for name in _MOUNT_VARIABLES)
        self._copying = asyncio.Semaphore(COPIES_AT_ONCE)
        self._copies = Copies(copies or next(filter(None, mounted), ""))

    def repository(self, address: CloudAddress) -> CloudRepository:
        from kernel.repository.clouds.places import RepositoryPlace
        from kernel.repository.clouds.repository import CloudRepository

        place = RepositoryPlace(address)
        return CloudRepository(address, place.now(), self._reader, self._copies, self._copying, place.now)

    async def close(self) -> None:
        await self._reader.close()
        with contextlib.suppress(TimeoutError):  # their file system hangs: the next server removes them
            async with asyncio.timeout(_CLOSE_S):
                await in_file_thread(self._copies.close)


class RepositoryListing:
    """The repositories of a server. All methods raise `InternalError` if a repository cannot be read."""

    def __init__(self, catalog: Catalog, repositories: Repositories) -> None:
        self._catalog = catalog
        self._repositories = repositories

    async def update_names(self) -> tuple[str, ...]:
        """Read the names of the models into the catalog, and return them."""
        known, duplicates = await self._repositories.names()
        self._catalog.set_known(known, duplicates)
        return tuple(known.values())

    async def scan(self, names: Sequence[str] = ("*",)) -> RepositoryContents:
        """List all files, and put the names of the models into the catalog; with `names` the files of these models.

        Then other folders are not read, because a repository may have many files.
        """
        if "*" not in names:
            others = await self.update_names()
            parts = [await self.scan_for(name) for name in names]
            return RepositoryContents(
                models={key: folder for part in parts for key, folder in part.models.items()},
                duplicates={key: paths for part in parts for key, paths in part.duplicates.items()},
                others=others,
                traffic={name: file for part in parts for name, file in part.traffic.items()},
            )
        found = await self._repositories.scan()
        self._set_known(found)
        return found

    async def poll(self) -> tuple[RepositoryContents, ServingError | None]:
        """List all files as `Repositories.poll` does, and put the names of the models into the catalog."""
        found, error = await self._repositories.poll()
        self._set_known(found)
        return found, error

    def _set_known(self, found: RepositoryContents) -> None:
        known = {identifier: folder.name for identifier, folder in found.models.items()}
        self._catalog.set_known(known, found.duplicates)

    async def scan_for(self, name: str) -> RepositoryContents:
        """List the files of the models called `name`."""
        return await self._repositories.scan(name)


class FileRules(Protocol):
    """What uses the rules. Implemented by `kernel.traffic.control.Traffic`."""

    def set_file(self, name: str, text: bytes | None, error: ServingError | None = None) -> None:
        """Use the content of a model's file; None: it has none. `error` is why it could not be read."""

    def kept_versions(self, name: str) -> set[int]:
        """Return the versions that the rule of a model names."""

    def may_fail(self, name: str, version: int) -> bool:
        """Whether a version is on trial: the others serve also if it cannot be loaded."""


class TrafficFiles:
    """The files that were read. Each is read again when it has changed."""

    def __init__(self, read: Callable[[str], bytes]) -> None:
        """`read` returns the content of a file that was listed. It blocks, and raises `ServingError`."""
        self._read = read
        self._known: dict[str, TrafficFile] = {}
        #: Set by the composition root, before the first listing; None where nothing uses the rules.
        self.rules: FileRules | None = None

    def versions(self, name: str, chosen: list[int], found: Collection[int]) -> list[int]:
        """Return the versions to load, ascending: those that the policy has `chosen`, and those that the rule names.

        `found` are the versions that there are.
        """
        kept = set() if self.rules is None else self.rules.kept_versions(name) & set(found)
        return sorted({*chosen, *kept}) if kept else chosen

    def only_trials(self, name: str, versions: Collection[int]) -> bool:
        """Whether all these versions are on trial, and the others serve without them."""
        return self.rules is not None and all(self.rules.may_fail(name, version) for version in versions)

    async def read(self, found: RepositoryContents, names: Collection[str] | None = None) -> None:
        """Read what is new in a listing, which is of the models `names`, or of all."""
        if self.rules is None:
            return
        for name, file in found.traffic.items():
            if self._known.get(name) == file:
                continue
            try:
                text = await in_file_thread(self._read, file.path)
            except ServingError as error:  # it is tried again with the next listing
                self._known.pop(name, None)
                self.rules.set_file(name, None, error)
            else:
                self._known[name] = file
                self.rules.set_file(name, text)
        for name in [name for name in self._known if name not in found.traffic and (names is None or name in names)]:
            del self._known[name]
            self.rules.set_file(name, None)
