"""Models one after the other become an ensemble."""

from __future__ import annotations

import pytest

from kernel.authoring.chain import chain
from kernel.config.autofill import normalise
from kernel.config.check import check_complete, check_config
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.gpus import NO_GPUS
from kernel.config.load import from_pbtxt
from kernel.errors import BadConfig


def model(name: str, inputs: str, outputs: str, *, batch: int = 0, datatype: str = "FP32") -> ModelConfig:
    """Return a model; `inputs` and `outputs` are names, each with its dims: "A:2 B:-1"."""
    text = f'name: "{name}" max_batch_size: {batch} '
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors.split():
            tensor_name, _, dims = tensor.partition(":")
            text += f'{kind} {{ name: "{tensor_name}" data_type: TYPE_{datatype} dims: [ {dims} ] }} '
    return from_pbtxt(text.encode(), "")


def maps(config: ModelConfig) -> list[tuple[dict[str, str], dict[str, str]]]:
    return [(dict(step.input_map), dict(step.output_map)) for step in config.ensemble_scheduling.step]


def tensors(config: ModelConfig) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    return {each.name: list(each.dims) for each in config.input}, {each.name: list(each.dims) for each in config.output}


def checked(name: str, *models: ModelConfig) -> ModelConfig:
    """Return the ensemble, after the checks of a load."""
    config = chain(name, models)
    complete = ModelConfig()
    complete.CopyFrom(config)
    normalise(complete, NO_GPUS)
    check_config(complete, name)
    check_complete(complete, NO_GPUS)
    return config


def test_the_only_output_goes_to_the_only_input() -> None:
    config = checked("e", model("a", "X:2", "Y:3"), model("b", "IN:3", "OUT:4"))
    assert maps(config) == [({"X": "X"}, {"Y": "Y"}), ({"IN": "Y"}, {"OUT": "OUT"})]
    assert tensors(config) == ({"X": [2]}, {"OUT": [4]})


def test_equal_names_are_connected_and_what_nobody_makes_comes_from_the_client() -> None:
    config = checked("e", model("a", "X:2", "Y:3 UNUSED:1"), model("b", "Y:3 MASK:5", "OUT:4"))
    assert maps(config) == [({"X": "X"}, {"Y": "Y"}), ({"Y": "Y", "MASK": "MASK"}, {"OUT": "OUT"})]
    assert tensors(config) == ({"X": [2], "MASK": [5]}, {"OUT": [4]})


def test_a_later_step_may_use_an_output_of_an_earlier_one() -> None:
    config = checked("e", model("a", "X:2", "Y:3"), model("b", "Y:3", "Z:4"), model("c", "Z:4 Y:3", "OUT:1"))
    assert maps(config)[2] == ({"Z": "Z", "Y": "Y"}, {"OUT": "OUT"})


def test_the_same_model_twice_keeps_the_tensors_apart() -> None:
    twice = model("a", "IN:2", "OUT:2")
    config = checked("e", twice, twice)
    assert maps(config) == [({"IN": "IN"}, {"OUT": "OUT"}), ({"IN": "OUT"}, {"OUT": "a_OUT"})]


def test_batching_is_that_of_all_models() -> None:
    config = checked("e", model("a", "X:2", "Y:3", batch=8), model("b", "Y:3", "OUT:4", batch=4))
    assert config.max_batch_size == 4
    assert tensors(config) == ({"X": [2]}, {"OUT": [4]})


def test_rows_are_a_dimension_if_one_model_does_not_batch() -> None:
    config = checked("e", model("a", "X:2", "Y:3", batch=8), model("b", "Y:-1,3", "OUT:4"))
    assert config.max_batch_size == 0
    assert tensors(config) == ({"X": [-1, 2]}, {"OUT": [4]})


def test_steps_that_have_nothing_in_common_are_refused_with_their_tensors() -> None:
    with pytest.raises(BadConfig, match=r"no output of 'a' \(Y, Z\) is an input of 'b' \(V, W\): name them alike"):
        chain("e", [model("a", "X:2", "Y:3 Z:3"), model("b", "V:3 W:3", "OUT:4")])


def test_tensors_of_another_type_are_refused() -> None:
    with pytest.raises(BadConfig, match="TYPE_INT32"):
        chain("e", [model("a", "X:2", "Y:3"), model("b", "IN:3", "OUT:4", datatype="INT32")])


def test_a_decoupled_step_makes_the_ensemble_decoupled() -> None:
    decoupled = model("a", "X:2", "Y:3")
    decoupled.model_transaction_policy.decoupled = True
    assert checked("e", decoupled, model("b", "Y:3", "OUT:4")).model_transaction_policy.decoupled
