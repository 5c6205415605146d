from __future__ import annotations

import json
from typing import Any

import pytest

from backends.python.model_config import ModelConfig

IN = {"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}
FUNCTION = "in auto-complete-config function for model 'm'"


def config(**more: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", **more}))


def reason(call: Any, *arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    return str(caught.value)


def test_missing_fields_get_their_defaults() -> None:
    completed = config(input=[{"name": "IN"}])
    assert completed.as_dict() == {
        "name": "m",
        "max_batch_size": 0,
        "input": [{"name": "IN", "data_type": "TYPE_INVALID", "dims": []}],
        "output": [],
    }


def test_dims_may_be_strings_as_in_protobuf_json() -> None:
    completed = config(input=[{**IN, "dims": ["-1"]}])
    completed.add_input(dict(IN))
    assert completed.as_dict()["input"] == [IN]


def test_a_batch_size_may_increase_but_not_decrease() -> None:
    completed = config(max_batch_size=4)
    completed.set_max_batch_size(8)
    assert completed.as_dict()["max_batch_size"] == 8
    assert reason(completed.set_max_batch_size, 2) == (
        "configuration specified max_batch_size 8, but in auto-complete-config function for model 'm' "
        "specified max_batch_size 2"
    )


def test_dynamic_batching_is_set_once() -> None:
    completed = config()
    completed.set_dynamic_batching()
    assert completed.as_dict()["dynamic_batching"] == {}
    configured = config(dynamic_batching={"max_queue_delay_microseconds": 5})
    configured.set_dynamic_batching()
    assert configured.as_dict()["dynamic_batching"] == {"max_queue_delay_microseconds": 5}


@pytest.mark.parametrize("scheduler", ["sequence_batching", "ensemble_scheduling"])
def test_dynamic_batching_is_refused_beside_another_scheduler(scheduler: str) -> None:
    assert reason(config(**{scheduler: {}}).set_dynamic_batching) == (
        f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function for "
        "model 'm' tries to set scheduling_choice as 'dynamic_batching'"
    )


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_tensor_is_added_or_completed(kind: str) -> None:
    completed = config(**{kind: [{"name": "IN"}]})
    add = getattr(completed, f"add_{kind}")
    add(dict(IN))
    add({**IN, "name": "MORE"})
    assert completed.as_dict()[kind] == [IN, {**IN, "name": "MORE"}]


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_tensor_that_contradicts_the_configuration_is_refused(kind: str) -> None:
    add = getattr(config(**{kind: [{**IN, "dims": [4]}]}), f"add_{kind}")
    assert reason(add, {**IN, "data_type": "TYPE_INT8"}) == (
        f"unable to load model 'm', configuration expects datatype TYPE_FP32 for {kind} 'IN', model provides TYPE_INT8"
    )
    assert reason(add, IN) == (
        "model 'm', tensor 'IN': the model expects dims [-1] but the model configuration specifies dims [4]"
    )


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_tensor_must_have_its_three_properties(kind: str) -> None:
    add = getattr(config(), f"add_{kind}")
    assert reason(add, {}) == f"{kind} {FUNCTION} is missing 'name' property."
    assert reason(add, {"name": "IN"}) == f"{kind} 'IN' {FUNCTION} is missing 'data_type' property."
    assert reason(add, {"name": "IN", "data_type": "TYPE_FP32"}) == (
        f"{kind} 'IN' {FUNCTION} is missing 'dims' property."
    )


def test_a_tensor_must_have_no_other_properties() -> None:
    assert reason(config().add_input, {**IN, "x": 1}) == (
        f"input 'IN' {FUNCTION} contains property other than 'name', 'data_type', 'dims' and 'optional'."
    )
    assert reason(config().add_output, {**IN, "optional": True}) == (
        f"output 'IN' {FUNCTION} contains property other than 'name', 'data_type' and 'dims'."
    )


def test_an_input_may_be_optional() -> None:
    completed = config()
    completed.add_input({**IN, "optional": True})
    assert completed.as_dict()["input"][0]["optional"] is True
    assert reason(completed.add_input, {**IN, "optional": False}) == (
        "model 'm', tensor 'IN': the model expects optional False but the model configuration specifies optional True"
    )


def test_a_model_can_set_its_transaction_policy() -> None:
    completed = config()
    completed.set_model_transaction_policy({"decoupled": True})
    assert completed.as_dict()["model_transaction_policy"] == {"decoupled": True}
    assert reason(completed.set_model_transaction_policy, {"decoupled": False}) == (
        "trying to change decoupled property in auto-complete-config for model 'm', which is already set to 'True'."
    )
    assert reason(completed.set_model_transaction_policy, {"other": 1}) == (
        "model transaction property in auto-complete-config function for model 'm' "
        "contains property other than 'decoupled'."
    )
