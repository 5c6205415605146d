"""Which users have shortened their shared memory: for a time, their regions are copied and not mapped. Pure.

If a process accesses mapped memory that no longer exists, the process ends (SIGBUS). The owner of a region's file can
shorten it at any time, as can users to whom the owner gives write access. So users are distrusted, not the client's
address, which all clients of a machine share.
"""

from __future__ import annotations

#: How long a user is distrusted after the last time. A single error of a client is forgiven after this time;
#: one that does it on purpose can end workers once in this time.
DISTRUST_NS = 600 * 1_000_000_000


class DistrustedUsers:
    """User ids, each with the time until which it is distrusted."""

    def __init__(self) -> None:
        self._until_ns: dict[int, int] = {}

    def add(self, uid: int, now_ns: int) -> bool:
        """Distrust a user from now on. Returns whether the user was trusted before."""
        trusted = not self.has(uid, now_ns)
        self._until_ns[uid] = now_ns + DISTRUST_NS
        return trusted

    def has(self, uid: int, now_ns: int) -> bool:
        """Whether a user is distrusted now."""
        return now_ns < self._until_ns.get(uid, 0)
