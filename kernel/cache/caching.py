"""The response cache of a server: which one it is, which models use it, and what identifies a load of a model in keys.

An entry point of the group `naiad.caches` has the name of a cache, and names a function that takes the settings (a
dictionary of texts) and returns a `CacheStore`. It raises ValueError for wrong settings. See docs/caches.md.

In a cache of this process, each load has entries of its own. In a cache that servers share, a load is known by its
configuration and by the names, sizes and times of its files, so that servers with the same files share entries. If one
process loads the same files twice, something else has changed that the files do not show: the second load has entries
of its own. The responses of an ensemble depend on its steps, whose loads are part of its keys.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import TYPE_CHECKING

from kernel.background import BackgroundTasks
from kernel.cache.config import LOCAL, SIGNING_KEY_FILE, CacheChoice, local_byte_size
from kernel.cache.local import LocalCache
from kernel.cache.lookup import CacheAccess
from kernel.cache.redis_store import REDIS, RedisStore, redis_settings
from kernel.cache.stored import StoredCache, read_signing_key
from kernel.errors import InvalidArgument, ServingError
from kernel.file_threads import in_file_thread
from kernel.naiad_module import make_importable
from kernel.server_parts import ServerPart
from kernel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernel.cache.interface import CacheStore, ResponseCache
    from kernel.loop.clock import Clock
    from kernel.serving.catalog import Catalog
    from kernel.serving.helper_tasks import Helpers, RegionAccess
    from kernel.serving.interface import CacheFigures
    from kernel.serving.model import Model
    from shm.blocks import ByteBudget

ENTRY_POINT_GROUP = "naiad.caches"

#: How long each call of a package's store may take, in seconds.
STORE_TIMEOUT_S = 0.2

_BUILT_IN = (LOCAL, REDIS)


def make_cache(choice: CacheChoice, clock: Clock, budget: ByteBudget) -> ResponseCache:
    """Return the cache that the command line asks for. Raises `InvalidArgument`."""
    if choice.name == LOCAL:
        return LocalCache(local_byte_size(choice.settings, budget.limit_byte_size), budget)
    given = dict(choice.settings)
    key_file = given.pop(SIGNING_KEY_FILE, "")
    signing = read_signing_key(key_file) if key_file else None
    if choice.name == REDIS:
        settings = redis_settings(given)
        title = f"Redis at {settings.host}:{settings.port}"
        return StoredCache(
            RedisStore(settings), clock,
            title=title, timeout_s=settings.socket_ms / 1000, value_limit=settings.max_byte_size,
            signing=signing,
        )  # fmt: skip
    try:
        store = _factory(choice.name)(given)
    except ValueError as error:
        raise InvalidArgument(f"cache '{choice.name}' does not take its settings: {error}") from None
    return StoredCache(store, clock, title=f"cache '{choice.name}'", timeout_s=STORE_TIMEOUT_S, signing=signing)


def _factory(name: str) -> Callable[[dict[str, str]], CacheStore]:
    """Return the function that a package names for the cache. Raises `InvalidArgument`."""
    from importlib.metadata import entry_points  # imported late: most servers do without it

    points = entry_points(group=ENTRY_POINT_GROUP)
    for point in points:
        if point.name == name:
            make_importable()
            factory: Callable[[dict[str, str]], CacheStore] = point.load()
            return factory
    known = ", ".join(sorted({*_BUILT_IN, *points.names}))
    raise InvalidArgument(
        f"unable to find cache '{name}'; caches are {known}. Packages add others with entry points of the group "
        f"'{ENTRY_POINT_GROUP}'"
    )


_SALT_BYTE_SIZE = 16


class ResponseCaching(ServerPart):
    """Puts the cache in front of models. A part of the server. Implements `kernel.serving.model.ModelExtension`."""

    def __init__(
        self, cache: ResponseCache, catalog: Catalog, *, helpers: Helpers, regions: RegionAccess, clock: Clock
    ) -> None:
        self.cache = cache
        self._catalog = catalog
        self._helpers = helpers
        self._regions = regions
        self._clock = clock
        #: What the files of loads were, for a shared cache.
        self._seen: set[bytes] = set()
        self._tasks = BackgroundTasks()

    async def extend(self, model: Model, folder: Path) -> None:
        """Put the cache in front of a model that is loaded from `folder`, if its configuration says so.

        Called for every model, because ensembles need the salts of their steps.
        """
        model.cache_salt = await in_file_thread(self._load_salt, model, folder)
        spec = model.spec
        if spec.response_cache and not spec.decoupled and not spec.sequence_batching:
            salt = _EnsembleSalt(model, self._catalog) if spec.ensemble else None
            model.statistics.cached = True
            model.entrance = CacheAccess(
                model, self.cache, (lambda: model.cache_salt) if salt is None else salt.current,
                helpers=self._helpers, regions=self._regions, start=self._tasks.start, clock=self._clock,
            )  # fmt: skip

    def _load_salt(self, model: Model, folder: Path) -> bytes:
        """Return what identifies this load in keys. Blocks."""
        if not self.cache.shared:
            return secrets.token_bytes(_SALT_BYTE_SIZE)
        salt = files_salt(model, folder)
        if salt in self._seen:
            return secrets.token_bytes(_SALT_BYTE_SIZE)
        self._seen.add(salt)
        return salt

    async def close(self) -> None:
        """End all lookups and close the cache. The server has no requests any more."""
        await self._tasks.close()
        await self.cache.close()

    def figures(self) -> CacheFigures:
        return self.cache.figures


def files_salt(model: Model, folder: Path) -> bytes:
    """Return a digest of the configuration and the files of a model version, equal on all servers. Blocks."""
    hasher = hashlib.blake2b(model.config.SerializeToString(deterministic=True), digest_size=_SALT_BYTE_SIZE)
    hasher.update(f"\0{__version__}\0{model.name}\0{model.version}\0".encode())
    version = folder / str(model.version)
    for parent, folders, files in os.walk(version):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(parent, name)
            try:
                status = os.stat(path)
            except FileNotFoundError:  # a broken link
                continue
            described = f"{os.path.relpath(path, version)}\0{status.st_size}\0{status.st_mtime_ns}\0"
            hasher.update(described.encode(errors="surrogateescape"))
    return hasher.digest()


class _EnsembleSalt:
    """The salt of an ensemble: its own, and the salts of all models that its steps reach."""

    def __init__(self, model: Model, catalog: Catalog) -> None:
        self._model = model
        self._catalog = catalog
        #: The generation of the catalog to which `_salt` belongs.
        self._generation = -1
        self._salt: bytes | None = None

    def current(self) -> bytes | None:
        """Return the salt, or None if a step cannot be executed now: then the ensemble says why."""
        if self._generation != self._catalog.generation:
            self._generation = self._catalog.generation
            try:
                salts = sorted(model.cache_salt for model in self._catalog.with_steps(self._model))
            except ServingError:
                self._salt = None
            else:
                self._salt = hashlib.blake2b(b"".join(salts), digest_size=_SALT_BYTE_SIZE).digest()
        return self._salt
