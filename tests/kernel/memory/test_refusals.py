"""The errors of requests without memory: whether to try again, and what the log says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.memory.refusals import MemoryRefusals
from shm.budget import ByteBudget

if TYPE_CHECKING:
    import pytest


def test_an_error_says_which_limit_is_too_small_for_ever() -> None:
    refusals = MemoryRefusals(1000, ByteBudget(5000))
    found = [(error.message, error.retry_later) for error in map(refusals.no_room, (900, 1001, 5001))]
    never = "bytes is larger than all memory that there is for it"
    assert found == [
        ("no memory left for a tensor of 900 bytes; try again later", True),
        (f"a tensor of 1001 {never} (--arena-byte-size=1000)", False),
        (f"a tensor of 5001 {never} (--memory-byte-size=5000)", False),
    ]
    assert refusals.count == 3


def test_the_log_says_what_is_in_use_and_which_flag_limits_it(caplog: pytest.LogCaptureFixture) -> None:
    budget = ByteBudget(5000)
    budget.add(4500)
    MemoryRefusals(1000, budget).full()
    assert [record.getMessage() for record in caplog.records] == [
        "a request is refused: no memory left: tensors of other requests take all of it; try again later; "
        "all requests together use 4500 of 5000 bytes (--memory-byte-size)"
    ]


def test_without_a_budget_only_the_limit_of_a_model_counts() -> None:
    assert "--arena-byte-size=1000" in MemoryRefusals(1000, None).no_room(2000).message
