"""Requests that are refused because there is no memory for them: the errors, the log, and how many there were."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kernel.errors import ArenaFull, MemoryFull
from kernel.observe.repeats.limited_log import LimitedLog

if TYPE_CHECKING:
    from shm.budget import ByteBudget


class MemoryRefusals:
    """Makes the errors of one server."""

    def __init__(self, arena_byte_size: int, budget: ByteBudget | None) -> None:
        """`arena_byte_size` is the limit of each model, `budget` that of the server, if it has one."""
        self._arena_byte_size = arena_byte_size
        self._budget = budget
        self._log = LimitedLog(logging.getLogger(__name__), logging.WARNING)
        #: How many errors were made.
        self.count = 0

    def no_room(self, byte_size: int, what: str = "tensor") -> ArenaFull:
        """Return the error of a request with a `what` of `byte_size` bytes, for which no block was found."""
        exceeded = ""
        if self._budget is not None and byte_size > self._budget.limit_byte_size:
            exceeded = f"--memory-byte-size={self._budget.limit_byte_size}"
        elif byte_size > self._arena_byte_size:
            exceeded = f"--arena-byte-size={self._arena_byte_size}"
        error = ArenaFull(byte_size, what, exceeded)
        self._report(error)
        return error

    def full(self) -> MemoryFull:
        """Return the error of a request that comes while all memory is in use."""
        error = MemoryFull()
        self._report(error)
        return error

    def _report(self, error: ArenaFull | MemoryFull) -> None:
        self.count += 1
        use, budget = "", self._budget
        if budget is not None:
            bytes_used = f"{budget.used_byte_size} of {budget.limit_byte_size} bytes"
            use = f"; all requests together use {bytes_used} (--memory-byte-size)"
        self._log.log("requests without memory", "a request is refused: %s%s", error.message, use)
