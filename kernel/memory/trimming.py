"""When the memory of requests that have ended is given back to the system.

malloc keeps most of what is freed. After a flood of requests a server would keep hundreds of MiB. To give them back
takes about 0.1 ms per MiB, in which no other thread can allocate: so it is done when little is in use again, and not
often.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.budget import ByteBudget

#: Fewer freed bytes are kept for the next requests.
LEAST_BYTE_SIZE = 32 << 20

#: How often the use is looked at, in seconds, and the least time between two times that memory is given back.
_INTERVAL_S = 1.0
LEAST_INTERVAL_NS = 5_000_000_000


class Trimming:
    """Decides from the bytes in use. Pure."""

    def __init__(self) -> None:
        #: The most bytes that were seen in use since memory was given back.
        self._most = 0
        self._not_before_ns = 0

    def is_due(self, used_byte_size: int, now_ns: int) -> bool:
        """Whether memory is to be given back now."""
        self._most = max(self._most, used_byte_size)
        if used_byte_size > self._most // 4 or self._most - used_byte_size < LEAST_BYTE_SIZE:
            return False
        if now_ns < self._not_before_ns:
            return False
        self._most = used_byte_size
        self._not_before_ns = now_ns + LEAST_INTERVAL_NS
        return True


async def give_freed_memory_back(budget: ByteBudget, give_back: Callable[[], None]) -> None:
    """Call `give_back`, in a thread, when the requests that used memory have ended. Runs until it is cancelled."""
    trimming = Trimming()
    while True:
        await asyncio.sleep(_INTERVAL_S)
        if trimming.is_due(budget.used_byte_size, time.monotonic_ns()):
            await asyncio.to_thread(give_back)
