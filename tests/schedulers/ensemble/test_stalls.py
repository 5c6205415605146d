"""Streams that may wait for themselves."""

from __future__ import annotations

from kernel.config.ensemble_spec import EnsembleSpec
from schedulers.ensemble.plan import EnsemblePlan
from schedulers.ensemble.stalls import LONGEST_STALL_NS, StalledStreams, feeding_themselves
from schedulers.testing import KernelLab, spec_of, step


def test_requests_that_stand_still_are_found_one_after_the_other() -> None:
    streams = StalledStreams[str]()
    assert streams.until_ns is None
    streams.moved("a", 0)
    streams.moved("b", 5)
    streams.moved("a", 7)
    assert streams.until_ns == 5 + LONGEST_STALL_NS
    assert streams.overdue(4 + LONGEST_STALL_NS) == []
    assert streams.overdue(7 + LONGEST_STALL_NS) == ["b", "a"]
    assert streams.until_ns == 7 + 2 * LONGEST_STALL_NS, "they are found again after the same time"
    streams.remove("a")
    streams.remove("b")
    streams.remove("b")
    assert streams.until_ns is None


def found(lab: KernelLab, *models: str) -> frozenset[int]:
    """Return the steps of a chain of these models whose responses their own model needs."""
    tensors = ["A", *(f"t{number}" for number in range(1, len(models))), "Z"]
    steps = tuple(
        step(name, {"IN": source}, {"OUT": target})
        for name, source, target in zip(models, tensors, tensors[1:], strict=False)
    )
    ensemble = EnsembleSpec(steps)
    plan = EnsemblePlan(spec_of("e", "A", "Z", decoupled=True, ensemble=ensemble), ensemble)
    return feeding_themselves(plan, [lab.catalog.resolve(name) for name in models], lab.catalog.resolve)


def test_a_stream_feeds_itself_if_a_step_behind_it_needs_the_same_model_directly_or_in_an_ensemble() -> None:
    lab = KernelLab()
    lab.add(spec_of("m", "IN", "OUT"))
    for name in ("s", "t"):
        lab.add(spec_of(name, "IN", "OUT", decoupled=True))
    inner = EnsembleSpec((step("m", {"IN": "IN"}, {"OUT": "b"}), step("s", {"IN": "b"}, {"OUT": "OUT"})))
    lab.add(spec_of("inner", "IN", "OUT", decoupled=True, ensemble=inner))
    assert found(lab, "s", "m") == frozenset()
    assert found(lab, "s", "t") == frozenset()
    assert found(lab, "s", "m", "s") == {0}
    assert found(lab, "s", "m", "inner") == {0}
    assert found(lab, "inner", "m") == {0}, "a nested ensemble that streams counts as all its models"
    assert found(lab, "m", "s", "m") == frozenset()
