"""Models that failed to load are tried again when their files change, and after growing pauses."""

from __future__ import annotations

from itertools import pairwise

from kernel.repository.failed_loads import MAX_PAUSE_NS, FailedLoads
from kernel.repository.layout import Entry, ModelFolder

POLL_NS = 10_000_000_000


def folder(name: str = "m", version: int = 1) -> ModelFolder:
    entry = Entry("m", is_folder=True)
    return ModelFolder(name, "/r/m", entry, {version: entry})


def polls_that_try(loads: FailedLoads, count: int) -> list[int]:
    """Let each load fail, and return at which polls there is one; a poll comes 10 ms late."""
    found = []
    for number in range(count):
        now_ns = number * (POLL_NS + 10_000_000)
        if loads.is_due(folder(), now_ns):
            found.append(number)
            loads.ended(folder(), now_ns + 1_000_000, failed=True)
    return found


def test_the_pauses_double_up_to_a_limit() -> None:
    tried = polls_that_try(FailedLoads(POLL_NS), 200)
    assert tried[:6] == [0, 1, 3, 7, 15, 31]
    longest = MAX_PAUSE_NS // POLL_NS
    assert {later - earlier for earlier, later in pairwise(tried[6:])} == {longest}


def test_changed_files_are_tried_at_once_and_begin_with_the_first_pause() -> None:
    loads = FailedLoads(POLL_NS)
    polls_that_try(loads, 20)
    changed = folder(version=2)
    assert loads.is_due(changed, 0)
    loads.ended(changed, 0, failed=True)
    assert not loads.is_due(changed, POLL_NS // 4)
    assert loads.is_due(changed, POLL_NS)


def test_a_model_that_was_loaded_or_never_failed_is_always_due() -> None:
    loads = FailedLoads(POLL_NS)
    loads.ended(folder(), 0, failed=True)
    assert loads.is_due(folder("other"), 0)
    loads.ended(folder(), 0, failed=False)
    assert loads.is_due(folder(), 0)
