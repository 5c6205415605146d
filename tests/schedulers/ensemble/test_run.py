"""Shapes between models with and without batching, and between an ensemble and its steps."""

from __future__ import annotations

import pytest

from kernel.config.spec import TensorSpec
from schedulers.ensemble.run import bridged, inside, outside


@pytest.mark.parametrize(
    ("shape", "batched", "dims", "batching", "wanted"),
    [
        ([3, 2], True, (2,), True, [3, 2]),
        ([2], False, (2,), False, [2]),
        ([2], False, (2,), True, [1, 2]),
        ([3, 2], False, (2,), True, [3, 2]),
        ([1, 2], True, (2,), False, [2]),
        ([1, 2], True, (1, 2), False, [1, 2]),
        ([3, 2], True, (-1, 2), False, [3, 2]),
        ([3, 2], True, (2,), False, [3, 2]),
        ([], False, (), False, []),
        ([1], True, (), False, []),
    ],
)
def test_a_batch_dimension_comes_and_goes_between_models(
    shape: list[int], batched: bool, dims: tuple[int, ...], batching: bool, wanted: list[int]
) -> None:
    assert bridged(shape, batched=batched, dims=dims, batching=batching) == wanted


def test_steps_see_the_reshaped_input_and_clients_the_shape_that_they_know() -> None:
    spec = TensorSpec("A", "FP32", (6, -1), (-1, 6, -1), reshape=(3, -1, 2))
    assert inside([4, 6, 5], spec, batched=True) == [4, 3, 5, 2]
    assert outside([4, 3, 5, 2], spec, batched=True) == [4, 6, 5]
    assert inside([6, 5], spec, batched=False) == [3, 5, 2]


def test_a_shape_of_another_rank_stays_as_it_is() -> None:
    spec = TensorSpec("A", "FP32", (6,), (6,), reshape=(3, 2))
    assert outside([6], spec, batched=False) == [6]
    assert inside([6], TensorSpec("A", "FP32", (6,), (6,)), batched=False) == [6]
