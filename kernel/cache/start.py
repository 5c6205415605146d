"""Makes the response cache where the options ask for one.

The modules are imported then, because they take memory that other servers need not spend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernel.cache.config import parse_cache_config
from kernel.serving.helper_tasks import Helpers, RegionAccess

if TYPE_CHECKING:
    from kernel.cache.caching import ResponseCaching
    from kernel.loop.clock import Clock
    from kernel.options import CacheOptions
    from kernel.serving.kernel import Kernel
    from shm.budget import ByteBudget


class CacheHelpers(Helpers, RegionAccess, Protocol):
    """The helpers hash large inputs, and read and write regions of clients."""


def make_caching(
    options: CacheOptions, kernel: Kernel, helpers: CacheHelpers, clock: Clock, budget: ByteBudget
) -> ResponseCaching | None:
    """Return the response cache, which counts in `budget`, if there is to be one. Raises `ServingError`."""
    choice = parse_cache_config(options.config, options.local_byte_size)
    if choice is None:
        return None
    from kernel.cache.caching import ResponseCaching
    from kernel.cache.registry import make_cache

    cache = make_cache(choice, clock, budget)
    kernel.cache_figures = cache.figures
    return ResponseCaching(cache, kernel.catalog, helpers=helpers, regions=helpers, clock=clock)
