"""The rules between an ensemble and the models of its steps. Texts that Triton was asked for are in the conformance
tests; here are the rules that those do not reach."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from kernel.config.check import check_complete, check_config
from kernel.config.check_ensemble import check_steps
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.gpus import NO_GPUS
from kernel.errors import BadConfig


def ensemble(*steps: tuple[str, str]) -> ModelConfig:
    """Return an ensemble `e` with inputs A and B and outputs Y and Z. A step is (input tensors, output tensors)."""
    config = ModelConfig(
        name="e",
        platform="ensemble",
        input=[{"name": name, "data_type": "TYPE_FP32", "dims": [1]} for name in "AB"],
        output=[{"name": name, "data_type": "TYPE_FP32", "dims": [1]} for name in "YZ"],
        version_policy={"latest": {"num_versions": 1}},
    )
    config.ensemble_scheduling.SetInParent()
    for inputs, outputs in steps:
        step = config.ensemble_scheduling.step.add(model_name="m", model_version=-1)
        step.input_map.update({f"IN{index}": name for index, name in enumerate(inputs)})
        step.output_map.update({f"OUT{index}": name for index, name in enumerate(outputs)})
    return config


def failure_of(config: ModelConfig) -> str:
    with pytest.raises(BadConfig) as caught:
        check_config(config, "e")
    return caught.value.message


@pytest.mark.parametrize(
    "steps",
    [
        [("AB", "YZ")],
        [("AB", "pq"), ("pq", "YZ")],
        [("pq", "YZ"), ("AB", "pq")],
        [("A", "p"), ("pB", "Y"), ("p", "Z")],
        [("AB", "Y"), ("Y", "Z")],
    ],
)
def test_an_ensemble_that_connects_inputs_to_outputs_passes(steps: list[tuple[str, str]]) -> None:
    config = ensemble(*steps)
    check_config(config, "e")
    check_complete(config, gpus=NO_GPUS)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "must specify 'step' for ensemble 'e'"),
        ([("", "YZ")], "must specify 'input_map' in step 0 of ensemble 'e'"),
        ([("AB", "YZ"), ("A", "")], "must specify 'output_map' in step 1 of ensemble 'e'"),
        (
            [("AB", "YZ"), ("AB", "Yp")],
            "ensemble tensor 'Y' can appear in an output map only once for ensemble 'e' step 1",
        ),
        (
            [("AB", "YY")],
            "ensemble tensor 'Y' can appear in an output map only once for ensemble 'e' step 0",
        ),
        ([("A", "YZ")], "ensemble input 'B' for ensemble e' is not used"),
        ([("AB", "Yp")], "ensemble output 'Z' for ensemble e' is not used"),
        (
            [("pA", "qY"), ("qB", "pZ")],
            (
                "output 'Y' for ensemble 'e' is not written: at least one of its depending tensors, 'q', is "
                "not connected"
            ),
        ),
        (
            [("AB", "Yp"), ("pq", "Z")],
            (
                "output 'Z' for ensemble 'e' is not written: at least one of its depending tensors, 'q', is "
                "not connected"
            ),
        ),
        ([("AB", "YZ"), ("AB", "p")], "ensemble tensor 'p' is unused in ensemble 'e'"),
        ([("AB", "YZ"), ("p", "q")], "ensemble tensor 'q' is unused in ensemble 'e'"),
        ([("AB", "Z"), ("Y", "p"), ("p", "q")], "output 'Y' for ensemble 'e' is not written"),
    ],
)
def test_a_graph_with_a_gap_is_refused(steps: list[tuple[str, str]], message: str) -> None:
    assert failure_of(ensemble(*steps)) == message


def test_a_step_must_name_its_model() -> None:
    config = ensemble(("AB", "YZ"))
    config.ensemble_scheduling.step[0].model_name = ""
    assert failure_of(config) == "must specify 'model_name' in step 0 of ensemble 'e'"


def test_an_ensemble_must_not_configure_instances() -> None:
    config = ensemble(("AB", "YZ"))
    config.instance_group.add()
    assert failure_of(config) == "instance group should not be specified for ensemble 'e'"

    config = ensemble(("AB", "YZ"))
    config.optimization.SetInParent()
    assert failure_of(config) == "optimization should not be specified for ensemble 'e'"

    config = ensemble(("AB", "YZ"))
    config.model_warmup.add()
    assert failure_of(config) == "model_warmup can not be specified for ensemble 'e'"


ONE_INPUT = 'input [{name: "IN" data_type: TYPE_FP32 dims: [2]}]'

ONE_OUTPUT = 'output [{name: "OUT" data_type: TYPE_FP32 dims: [2]}]'

MODELS = {
    "m": f'name: "m" {ONE_INPUT} {ONE_OUTPUT}',
    "rows": f'name: "rows" max_batch_size: 4 {ONE_INPUT} {ONE_OUTPUT}',
    "flat": 'name: "flat" input [{name: "IN" data_type: TYPE_FP32 dims: [-1, 2]}] '
    'output [{name: "OUT" data_type: TYPE_FP32 dims: [-1, 2]}]',
    "stream": f'name: "stream" model_transaction_policy {{decoupled: true}} {ONE_INPUT} {ONE_OUTPUT} '
    'output [{name: "MORE" data_type: TYPE_FP32 dims: [2]}]',
    "join": 'name: "join" input [{name: "X" data_type: TYPE_FP32 dims: [2]}, '
    f'{{name: "Y" data_type: TYPE_FP32 dims: [2]}}] {ONE_OUTPUT}',
}


def checked(*steps: tuple[str, str, str], batch: int = 0, dims: str = "[2]", more: str = "") -> bool:
    """Check an ensemble from A to Z. A step is its model, its inputs and its outputs: `IN=A`."""
    text = f'name: "e" platform: "ensemble" max_batch_size: {batch} '
    text += f'input [{{name: "A" data_type: TYPE_FP32 dims: {dims} {more}}}] '
    text += f'output [{{name: "Z" data_type: TYPE_FP32 dims: {dims}}}] ensemble_scheduling {{'
    for model, inputs, outputs in steps:
        text += f'step {{ model_name: "{model}" model_version: -1 '
        for field, pairs in (("input_map", inputs), ("output_map", outputs)):
            for pair in pairs.split():
                key, _, value = pair.partition("=")
                text += f'{field} {{ key: "{key}" value: "{value}" }} '
        text += "} "
    models = {name: text_format.Parse(config, ModelConfig()) for name, config in MODELS.items()}
    return check_steps(text_format.Parse(text + "}", ModelConfig()), models)


def test_an_ensemble_is_decoupled_if_a_model_of_it_is() -> None:
    assert not checked(("m", "IN=A", "OUT=Z"))
    assert checked(("stream", "IN=A", "OUT=b"), ("m", "IN=b", "OUT=Z"))


def test_models_with_and_without_batches_can_follow_one_another() -> None:
    assert not checked(("rows", "IN=A", "OUT=b"), ("m", "IN=b", "OUT=Z"))
    assert not checked(("rows", "IN=A", "OUT=b"), ("flat", "IN=b", "OUT=Z"), batch=4)


def test_the_outputs_of_one_decoupled_step_belong_together() -> None:
    assert checked(("stream", "IN=A", "OUT=b MORE=c"), ("join", "X=b Y=c", "OUT=Z"))


def test_what_comes_from_a_stream_cannot_be_joined_with_what_does_not() -> None:
    text = "in ensemble e, step of model 'join' receives inputs originated from different decoupled models"
    with pytest.raises(BadConfig) as caught:
        checked(("stream", "IN=A", "OUT=b"), ("join", "X=b Y=A", "OUT=c"), ("m", "IN=c", "OUT=Z"))
    assert caught.value.message == text


def test_the_shape_between_two_models_must_fit_both() -> None:
    with pytest.raises(BadConfig) as caught:
        checked(("m", "IN=A", "OUT=b"), ("flat", "IN=b", "OUT=c"), ("flat", "IN=c", "OUT=Z"))
    assert caught.value.message == (
        "in ensemble e, ensemble tensor b: inconsistent shape: [2] is inferred from model m while [-1,2] is inferred "
        "from model flat"
    )


def test_a_shape_in_an_error_has_the_dimension_of_the_batch() -> None:
    with pytest.raises(BadConfig, match=r"inconsistent shape: \[-1,3\] is inferred from model e while \[-1,2\] is"):
        checked(("rows", "IN=A", "OUT=Z"), batch=4, dims="[3]")


def test_a_datatype_without_a_name_is_refused() -> None:
    models = {"m": text_format.Parse(MODELS["m"], ModelConfig())}
    config = text_format.Parse(
        'name: "e" input [{name: "A" data_type: 99 dims: [2]}] output [{name: "Z" data_type: TYPE_FP32 dims: [2]}] '
        'ensemble_scheduling { step { model_name: "m" model_version: -1 input_map { key: "IN" value: "A" } '
        'output_map { key: "OUT" value: "Z" } } }',
        ModelConfig(),
    )
    with pytest.raises(BadConfig, match=r"inconsistent data type:  is inferred from model e while TYPE_FP32 is"):
        check_steps(config, models)


def test_steps_see_the_reshaped_input_of_the_ensemble() -> None:
    with pytest.raises(BadConfig, match=r"inconsistent shape: \[1,2\] is inferred from model e"):
        checked(("m", "IN=A", "OUT=Z"), more="reshape { shape: [1, 2] }")
