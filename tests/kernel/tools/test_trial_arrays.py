"""Random inputs fit the model, and differences between outputs are told from rounding.

The outputs of a trial beside the configuration.
"""

from __future__ import annotations

import numpy as np
import pytest

from kernel.config.load import from_pbtxt
from kernel.config.spec import ModelSpec, TensorSpec, model_spec
from kernel.embedding.arrays import input_tensor
from kernel.serving.request import NO_SINK, Request
from kernel.serving.validation import validate
from kernel.tools.trial_arrays import SentOutput, can_stack, departures, difference, random_inputs, row_of, stacked
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


def spec(*outputs: TensorSpec) -> ModelSpec:
    return ModelSpec("m", "", "python", 0, {}, {output.name: output for output in outputs})


def output(name: str = "OUT", datatype: str = "FP32", dims: tuple[int, ...] = (-1, 3), **more: object) -> TensorSpec:
    return TensorSpec(name, datatype, dims, dims, **more)  # type: ignore[arg-type]


def test_outputs_as_configured_are_no_departure() -> None:
    assert departures(spec(output()), [[SentOutput("OUT", "FP32", [7, 3])], [SentOutput("OUT", "FP32", [0, 3])]]) == []


def test_an_output_may_be_left_out_of_some_responses() -> None:
    sent = [[SentOutput("A", "FP32", [1, 3])], [SentOutput("B", "FP32", [1, 3])], []]
    assert departures(spec(output("A"), output("B")), sent) == []


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (SentOutput("OUT", "FP64", [1, 3]), "output 'OUT' is FP64, but the configuration says FP32"),
        (SentOutput("OUT", "FP32", [1, 4]), "output 'OUT' has shape [1, 4], but the configuration says [-1, 3]"),
        (SentOutput("OUT", "FP32", [3]), "output 'OUT' has shape [3], but the configuration says [-1, 3]"),
    ],
)
def test_another_datatype_or_shape_is_named_once(sent: SentOutput, said: str) -> None:
    (line,) = departures(spec(output()), [[sent], [sent]])
    assert line.startswith(said)


def test_an_output_that_no_response_has_is_named() -> None:
    (line,) = departures(spec(output()), [[], []])
    assert line.startswith("output 'OUT' is in the configuration, but no response has it")


def test_an_output_that_is_not_configured_is_named_with_those_that_are() -> None:
    lines = departures(spec(output("A")), [[SentOutput("A", "FP32", [1, 3]), SentOutput("B", "FP32", [1])]])
    assert lines == ["output 'B' is not in the configuration, which has 'A'"]


def test_shapes_that_the_configuration_changes_are_not_compared() -> None:
    assert departures(spec(output(reshape=(3,))), [[SentOutput("OUT", "FP32", [3])]]) == []
    assert departures(spec(output(is_shape_tensor=True)), [[SentOutput("OUT", "FP32", [2])]]) == []


@pytest.mark.parametrize("batched", [False, True])
def test_models_of_trees_leave_dimensions_of_one_out(batched: bool) -> None:
    tensor = TensorSpec("OUT", "FP32", (1, 3), (-1, 1, 3) if batched else (1, 3))
    trees = ModelSpec("m", "", "fil", 8, {}, {"OUT": tensor})
    sent = [5, 3] if batched else [3]
    assert departures(trees, [[SentOutput("OUT", "FP32", sent)]]) == []
    (line,) = departures(trees, [[SentOutput("OUT", "FP32", [*sent[:-1], 4])]])
    assert line.startswith(f"output 'OUT' has shape {[*sent[:-1], 4]}")
