"""Which CPUs a worker runs on: set for all of its threads, before the model is loaded."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable


def run_on(cpus: Iterable[int]) -> None:
    """Run this process on `cpus` only: its threads, and those that they will start.

    Raises `InternalError`, with Triton's text, where the machine has none of them.
    """
    wanted = set(cpus)
    try:
        os.sched_setaffinity(0, wanted)
    except (OSError, OverflowError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InternalError(f"Unable to set NUMA thread affinity: {reason}") from None
    # Libraries that were imported to complete the configuration may have threads already.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), wanted)
