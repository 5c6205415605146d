"""What was lost before a helper could write it, and what the log says of it."""

from __future__ import annotations

from kernel.writing.losses import REPORT_S, Losses


def test_the_first_loss_of_each_cause_is_logged_at_once_and_the_next_ones_together() -> None:
    losses = Losses("trace was", "traces were")
    assert losses.add(1, "too many wait", 5.0) == ["1 trace was lost: too many wait"]
    assert losses.add(2, "the helper was lost", 6.0) == ["2 traces were lost: the helper was lost"]
    assert losses.add(3, "too many wait", 5.0 + REPORT_S - 1) == []
    assert losses.add(4, "too many wait", 5.0 + REPORT_S) == ["7 traces were lost: too many wait"]
    assert losses.count == 10


def test_texts_of_one_cause_are_one_cause() -> None:
    losses = Losses("trace was", "traces were")
    assert losses.add(1, "no route to a", 0.0, cause="collector") == ["1 trace was lost: no route to a"]
    assert losses.add(1, "no route to b", 1.0, cause="collector") == []
    assert losses.rest() == ["1 trace was lost: no route to b"]


def test_what_was_not_logged_is_logged_at_the_end_once() -> None:
    losses = Losses("record was", "records were")
    for _ in range(3):
        losses.add(2, "too many wait", 0.0)
    assert losses.rest() == ["4 records were lost: too many wait"]
    assert losses.rest() == []
    assert losses.add(0, "the server ends", 0.0) == []
    assert losses.count == 6
