from __future__ import annotations

import pytest

from kernel.config.check import check_complete, check_config
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
