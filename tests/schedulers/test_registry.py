"""Which scheduler a model gets."""

from __future__ import annotations

from kernel.config.spec import DynamicBatching
from kernel.testing import model_spec
from schedulers.direct import direct
from schedulers.dynamic.scheduler import dynamic
from schedulers.registry import scheduler_for


def test_a_model_without_batching_is_served_in_the_order_of_arrival() -> None:
    assert scheduler_for(model_spec()) is direct


def test_a_model_with_dynamic_batching_has_the_dynamic_batcher() -> None:
    assert scheduler_for(model_spec(max_batch_size=4, dynamic_batching=DynamicBatching())) is dynamic
