"""The outputs of a trial beside the configuration."""

from __future__ import annotations

import pytest

from kernel.authoring.trial.configured_outputs import SentOutput, departures
from kernel.config.spec import ModelSpec, TensorSpec


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
