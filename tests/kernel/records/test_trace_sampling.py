"""Which requests are traced."""

from __future__ import annotations

from kernel.records.tracer import Sampler
from kernel.settings import TraceValues


def hits(count: int, **settings: int) -> list[int]:
    sampler = Sampler(TraceValues(("TIMESTAMPS",), trace_file="/t", **settings))  # type: ignore[arg-type]
    return [number for number in range(1, count + 1) if sampler.hit()]


def test_every_request_of_a_rate_is_traced_and_the_first_is_the_one_with_that_number() -> None:
    assert hits(10, trace_rate=3) == [3, 6, 9]
    assert hits(3, trace_rate=1) == [1, 2, 3]


def test_a_count_ends_tracing() -> None:
    assert hits(20, trace_rate=3, trace_count=2) == [3, 6]
    assert hits(20, trace_rate=1, trace_count=0) == []


def test_no_request_is_traced_at_a_rate_of_zero() -> None:
    assert hits(1000, trace_rate=0) == []


def test_what_remains_of_the_count_is_known() -> None:
    sampler = Sampler(TraceValues(("TIMESTAMPS",), trace_rate=1, trace_count=5))
    assert [sampler.hit(), sampler.hit(), sampler.remaining] == [True, True, 3]


def test_tensors_are_traced_in_files_only() -> None:
    assert Sampler(TraceValues(("TIMESTAMPS", "TENSORS"))).tensors
    assert not Sampler(TraceValues(("TENSORS",), trace_mode="opentelemetry")).tensors
