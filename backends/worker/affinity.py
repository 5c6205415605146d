"""Sets the CPUs of a worker, for all of its threads, before the model is loaded."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable


def run_on(cpus: Iterable[int]) -> None:
    """Run all threads of this process, present and future, only on `cpus`.

    Raises `InternalError`, with Triton's text, if the machine has none of them.
    """
    wanted = set(cpus)
    try:
        os.sched_setaffinity(0, wanted)
    except (OSError, OverflowError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InternalError(f"Unable to set NUMA thread affinity: {reason}") from None
    # Libraries that were imported to complete the configuration may have started threads.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), wanted)
