"""The compute times of requests to ensembles."""

from __future__ import annotations

from kernel.observe.execution_reports import ComposedTimes
from kernel.observe.statistics import BatchStatistics, ModelStatistics, add_to_ensembles
from kernel.serving.request import NO_SINK, Request


def request(parent: Request | None = None, *, ensemble: bool = True) -> Request:
    made = Request("e", [], NO_SINK, parent=parent)
    if ensemble:
        made.composed = ComposedTimes()
    return made


def test_times_before_and_after_the_success_of_the_request_are_counted() -> None:
    times, statistics, batch = ComposedTimes(), ModelStatistics(), BatchStatistics()
    times.add(1, 2, 3)
    assert statistics.infer_ns == 0
    times.count_in(statistics, batch)
    times.add(10, 20, 30)
    assert (statistics.input_ns, statistics.infer_ns, statistics.output_ns) == (11, 22, 33)
    assert (batch.input_ns, batch.infer_ns, batch.output_ns) == (11, 22, 33)


def test_a_step_of_a_nested_ensemble_counts_in_both() -> None:
    outer = request()
    inner = request(outer)
    add_to_ensembles(inner, 1, 2, 3)
    assert outer.composed is not None
    assert inner.composed is not None
    assert (outer.composed.infer_ns, inner.composed.infer_ns) == (2, 2)


def test_calls_of_a_model_do_not_count_in_the_ensemble_whose_step_it_is() -> None:
    ensemble = request()
    model = request(ensemble, ensemble=False)
    add_to_ensembles(model, 1, 2, 3)
    assert ensemble.composed is not None
    assert ensemble.composed.infer_ns == 0
