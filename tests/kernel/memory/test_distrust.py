"""Users who shorten their memory are distrusted for a time."""

from __future__ import annotations

from kernel.memory.distrust import DISTRUST_NS, DistrustedUsers


def test_a_user_is_distrusted_for_a_time_after_the_last_occasion() -> None:
    users = DistrustedUsers()
    assert not users.has(1000, 5)
    assert users.add(1000, 5)
    assert users.has(1000, 5)
    assert not users.has(1001, 5)
    assert not users.add(1000, 100), "it was distrusted already"
    assert users.has(1000, 99 + DISTRUST_NS)
    assert not users.has(1000, 100 + DISTRUST_NS)
    assert users.add(1000, 100 + DISTRUST_NS)
