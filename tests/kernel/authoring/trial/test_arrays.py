"""Random inputs fit the model, and differences between outputs are told from rounding."""

from __future__ import annotations

import numpy as np
import pytest

from kernel.authoring.trial.arrays import can_stack, difference, random_inputs, row_of, stacked
from kernel.config.load import from_pbtxt
from kernel.config.spec import model_spec
from kernel.embedding.arrays import input_tensor
from kernel.serving.request import NO_SINK, Request
from kernel.serving.validation import validate
from shm.datatypes import DATATYPES

TYPES = [row.config_name for row in DATATYPES.values()]


@pytest.mark.parametrize("batch", [0, 4])
@pytest.mark.parametrize("datatype", TYPES)
def test_random_inputs_are_accepted(datatype: str, batch: int) -> None:
    text = f'max_batch_size: {batch} input [ {{ name: "IN" data_type: {datatype} dims: [ -1, 2 ] }} ]'
    spec = model_spec(from_pbtxt(text.encode(), ""))
    inputs = random_inputs(spec, 3, np.random.default_rng(1))
    assert inputs is not None
    assert inputs["IN"].shape == ((1, 3, 2) if batch else (3, 2))
    tensor = input_tensor("IN", inputs["IN"], spec.inputs["IN"].datatype)
    validate(Request("m", [tensor], NO_SINK), spec)


def test_inputs_that_would_be_huge_are_not_made() -> None:
    text = 'input [ { name: "IN" data_type: TYPE_FP32 dims: [ 100000, -1 ] } ]'
    assert random_inputs(model_spec(from_pbtxt(text.encode(), "")), 224, np.random.default_rng(1)) is None


def test_requests_become_rows_and_rows_results() -> None:
    rows = [{"IN": np.full((1, 2), number)} for number in range(3)]
    assert can_stack(rows)
    both = stacked(rows)
    assert both["IN"].shape == (3, 2)
    assert row_of(both, 1)["IN"].tolist() == [[1, 1]]
    assert not can_stack([*rows, {"IN": np.zeros((1, 3))}])


F32 = np.float32


@pytest.mark.parametrize(
    ("first", "second", "text", "rounding"),
    [
        (np.ones(2, F32), np.ones(2, F32), None, False),
        (np.array([np.nan, np.inf], F32), np.array([np.nan, np.inf], F32), None, False),
        (np.ones(2, F32), np.array([1, 1.000001], F32), "output 'X' differs by up to 9.54e-07", True),
        (np.ones(2, F32), np.array([1, 2], F32), "output 'X' differs by up to 1", False),
        (np.ones(2, F32), np.array([1, np.nan], F32), "output 'X' differs by up to 0", False),
        (np.ones(2, np.float16), np.array([1, 1.001], np.float16), "output 'X' differs by up to 0.000977", True),
        (np.ones(2), np.ones(2) + 1e-6, "output 'X' differs by up to 1e-06", False),
        (np.ones(3, int), np.array([1, 2, 3]), "output 'X' differs in 2 of 3 elements", False),
        (np.array([b"a"], object), np.array([b"b"], object), "output 'X' differs in 1 of 1 elements", False),
        (np.ones(2), np.ones(3), "output 'X' has shape [3] instead of [2]", False),
    ],
)
def test_a_difference_is_described(first: object, second: object, text: str | None, rounding: bool) -> None:
    found = difference({"X": np.asarray(first)}, {"X": np.asarray(second)})
    if text is None:
        assert found is None
    else:
        assert found is not None
        assert (found.text, found.rounding) == (text, rounding)


def test_missing_outputs_are_a_difference() -> None:
    found = difference({"X": np.ones(1)}, {"Y": np.ones(1)})
    assert found is not None
    assert found.text == "outputs Y instead of X"


def test_what_is_no_rounding_counts_more_than_rounding() -> None:
    expected = {"A": np.ones(1, F32), "B": np.ones(1, F32), "C": np.ones(1, F32)}
    values = (("A", 1.000001), ("B", 3), ("C", 1.000001))
    found = difference(expected, {name: np.array([value], F32) for name, value in values})
    assert found is not None
    assert "'B'" in found.text
