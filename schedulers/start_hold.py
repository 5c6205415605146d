"""`TRITONSERVER_DELAY_SCHEDULER=N`: a scheduler waits, once, until N requests are queued. For tests of batches.

Of a model with sequences, requests of sequences that have a slot count. `TRITONSERVER_BACKLOG_DELAY_SCHEDULER=M` lets
it wait for M requests of sequences without a slot, too.
"""

from __future__ import annotations

import os
import re

VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"
BACKLOG_VARIABLE = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"

#: As C's `atoi` reads it, which Triton uses.
_NUMBER = re.compile(r"\s*\+?([0-9]{1,9})", re.ASCII)


def hold_until_count() -> int:
    """Return how many requests a new scheduler waits for; 0 if it does not wait."""
    return _number(VARIABLE)


class SequenceHold:
    """What the scheduler of a model with sequences waits for, once."""

    def __init__(self) -> None:
        self._count = _number(VARIABLE)
        self._backlog_count = _number(BACKLOG_VARIABLE)  # which has no effect alone (Triton)

    @property
    def active(self) -> bool:
        """Whether it waits, as far as is known."""
        return self._count > 0

    def holds(self, placed_count: int, backlog_count: int) -> bool:
        """Whether it still waits, with so many requests of sequences with and without a slot."""
        if placed_count >= self._count and backlog_count >= self._backlog_count:
            self._count = 0
        return self.active


def _number(variable: str) -> int:
    found = _NUMBER.match(os.environ.get(variable, ""))
    return 0 if found is None else int(found[1])
