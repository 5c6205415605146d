"""Decides when a store that fails is asked again. Pure: times are handed in, in nanoseconds."""

from __future__ import annotations

#: After this number of failures in a row the store is not asked for a while.
FAILURE_LIMIT = 5

FIRST_PAUSE_NS = 1_000_000_000
LONGEST_PAUSE_NS = 30_000_000_000


class CircuitBreaker:
    """Lets calls pass until several in a row have failed. Then it refuses all calls for a time, and lets one try.

    The time doubles with each try that fails, up to a limit. A call that succeeds lets all pass again.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._pause_ns = 0
        self._closed_until_ns = 0
        #: Whether the one call that tries is under way.
        self._trying = False

    @property
    def paused(self) -> bool:
        """Whether the store is regarded as down."""
        return self._pause_ns > 0

    def allows(self, now_ns: int) -> bool:
        """Whether a call may be made now. `succeeded` or `failed` follows for each call that is made."""
        if not self._pause_ns:
            return True
        if self._trying or now_ns < self._closed_until_ns:
            return False
        self._trying = True
        return True

    def succeeded(self) -> bool:
        """A call has succeeded. Returns whether the store was regarded as down until now."""
        was_paused = self._pause_ns > 0
        self._failures = self._pause_ns = 0
        self._trying = False
        return was_paused

    def failed(self, now_ns: int) -> bool:
        """A call has failed. Returns whether the store is regarded as down from now on, and was not before."""
        if self._pause_ns:
            if self._trying:
                self._trying = False
                self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
                self._closed_until_ns = now_ns + self._pause_ns
            return False
        self._failures += 1
        if self._failures < FAILURE_LIMIT:
            return False
        self._pause_ns = FIRST_PAUSE_NS
        self._closed_until_ns = now_ns + self._pause_ns
        return True
