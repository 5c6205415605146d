"""`TRITONSERVER_DELAY_SCHEDULER=N`: a scheduler waits, once, until N requests are queued. For tests of batches."""

from __future__ import annotations

import os
import re

VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"

#: As C's `atoi` reads it, which Triton uses.
_NUMBER = re.compile(r"\s*\+?([0-9]{1,9})", re.ASCII)


def hold_until_count() -> int:
    """Return how many requests a new scheduler waits for; 0 if it does not wait."""
    found = _NUMBER.match(os.environ.get(VARIABLE, ""))
    return 0 if found is None else int(found[1])
