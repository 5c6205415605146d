"""Makes the cache of a server from the command line. Packages add caches by entry points.

An entry point of the group `naiad.caches` has the name of the cache, and names a function that takes the settings (a
dictionary of texts) and returns a `CacheStore`. It raises ValueError for wrong settings. See docs/caches.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.cache.config import LOCAL, SIGNING_KEY_FILE, CacheChoice, local_byte_size
from kernel.cache.local import LocalCache
from kernel.cache.redis_store import REDIS, RedisStore, redis_settings
from kernel.cache.signing import read_signing_key
from kernel.cache.stored import StoredCache
from kernel.errors import InvalidArgument
from kernel.naiad_module import make_importable

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.cache.interface import CacheStore, ResponseCache
    from kernel.loop.clock import Clock
    from shm.budget import ByteBudget

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
