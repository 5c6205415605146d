"""How long the machine itself stands still, seen by a process that only sleeps: `python -m tests.faults.stalls`.

It is due every five milliseconds, and counts how late it was woken. A wait of a client that is no longer than this is
no wait for the server. The process prints the longest one, in milliseconds, for each line that it reads.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from typing import TYPE_CHECKING

from bench.heavy.measurement import LineProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERVAL_S = 0.005


class Stalls:
    """What `watched` yields."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process

    def longest_ms(self) -> float:
        """Return the longest stall since the last call."""
        self._process.say()
        return float(self._process.line())


@contextlib.contextmanager
def watched() -> Iterator[Stalls]:
    """Measure while the block runs."""
    process = LineProcess("tests.faults.stalls")
    try:
        stalls = Stalls(process)
        stalls.longest_ms()  # the start of the process counts in no row
        yield stalls
    finally:
        process.close()


def main() -> None:
    longest_s, due = 0.0, time.perf_counter()
    while True:
        due = max(due + INTERVAL_S, time.perf_counter())
        readable, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))
        longest_s = max(longest_s, time.perf_counter() - due)
        if readable:
            if not sys.stdin.readline():
                return
            print(f"{longest_s * 1e3:.2f}", flush=True)
            longest_s = 0.0


if __name__ == "__main__":
    main()
