"""Which users have shortened their shared memory: for a time, their regions are copied and not mapped. Pure.

Memory that is gone when a process touches it ends that process (SIGBUS). The user who owns the file of a region can
shorten it at any time; nobody else can but those whom the owner lets write to it. So the user is what counts, not the
client's address, which all clients of a machine share.
"""

from __future__ import annotations

#: How long a user is distrusted after the last time. A client that errs once does not cost its user zero-copy for ever;
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
