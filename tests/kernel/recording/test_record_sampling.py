"""Which requests are recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.recording import sampling
from kernel.recording.sampling import RecordSampler

if TYPE_CHECKING:
    import pytest


def test_one_request_of_n_is_recorded_beginning_with_the_first() -> None:
    sampler = RecordSampler(3, {})
    assert [sampler.is_recorded("m") for _ in range(7)] == [True, False, False, True, False, False, True]


def test_rates_of_one_and_zero_record_all_and_none() -> None:
    sampler = RecordSampler(1, {"never": 0})
    assert [sampler.is_recorded(name) for name in ("m", "never", "m")] == [True, False, True]


def test_a_model_with_a_rate_of_its_own_is_counted_alone() -> None:
    sampler = RecordSampler(0, {"m": 2})
    assert [sampler.is_recorded(name) for name in ("m", "other", "m", "m")] == [True, False, False, True]


def test_all_requests_of_a_sequence_are_recorded_or_none() -> None:
    sampler = RecordSampler(2, {})
    seen = [
        sampler.is_recorded_of_sequence("m", id, start=start, end=end)
        for id, start, end in (
            (1, True, False), (2, True, False), (1, False, False), (2, False, False), (1, False, True),
            (1, False, False), (3, True, True), (3, False, False),
        )
    ]  # fmt: skip
    assert seen == [True, False, True, False, True, False, True, False]


def test_a_sequence_that_began_before_the_recorder_is_not_recorded() -> None:
    assert not RecordSampler(1, {}).is_recorded_of_sequence("m", 5, start=False, end=False)


def test_a_sequence_that_never_ends_is_forgotten_after_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_SEQUENCES", 2)
    sampler = RecordSampler(1, {})
    for id in (1, 2, 3):
        assert sampler.is_recorded_of_sequence("m", id, start=True, end=False)
    seen = [sampler.is_recorded_of_sequence("m", id, start=False, end=False) for id in (1, 2, 3)]
    assert seen == [False, True, True]
