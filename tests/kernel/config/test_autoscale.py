"""The parameter `naiad.autoscale`: its form, its defaults, and the models that can have it."""

from __future__ import annotations

import pytest

from kernel.config.check import check_config
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.model_parameters import AutoscaleSettings, autoscale_settings, model_parameters
from kernel.errors import BadConfig

MS, S = 10**6, 10**9


def config(text: str) -> ModelConfig:
    made = ModelConfig(name="m", backend="identity")
    made.instance_group.add(count=1)
    made.parameters["naiad.autoscale"].string_value = text
    return made


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("max=4", AutoscaleSettings(4)),
        ("min=2,max=2", AutoscaleSettings(2, 2)),
        (" min = 1 , max = 9999 ", AutoscaleSettings(9999)),
        ("max=3,up_after=50ms,down_after=2m", AutoscaleSettings(3, 1, 50 * MS, 120 * S)),
        ("down_after=1s,up_after=1s,max=8,min=2", AutoscaleSettings(8, 2, S, S)),
    ],
)
def test_counts_and_times_are_read_in_any_order(text: str, settings: AutoscaleSettings) -> None:
    check_config(config(text), "m")
    assert model_parameters(config(text)).autoscale == settings


def test_without_the_parameter_the_number_of_instances_stays() -> None:
    assert model_parameters(ModelConfig(name="m")).autoscale is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "''"),
        ("min=1", "no max"),
        ("max=0", "'max=0'"),
        ("max=-1", "'max=-1'"),
        ("max=10000", "'max=10000'"),
        ("max=٣", "'max=٣'"),
        ("max=4,max=5", "'max=5'"),
        ("max=4,most=5", "'most=5'"),
        ("max=4,", "''"),
        ("max", "'max'"),
        ("max=4,up_after=3", "'up_after=3'"),
        ("max=4,up_after=3h", "'up_after=3h'"),
        ("max=4,up_after=1.5s", "'up_after=1.5s'"),
        ("max=4,up_after=0ms", "a time of 0"),
        ("max=4,down_after=0s", "a time of 0"),
        ("min=5,max=4", "a min of 5 above the max of 4"),
    ],
)
def test_a_wrong_value_refuses_the_model_and_shows_the_form(text: str, what: str) -> None:
    with pytest.raises(BadConfig) as caught:
        check_config(config(text), "m")
    assert caught.value.message == (
        "parameter 'naiad.autoscale' of model 'm' must have the form min=1,max=4,up_after=500ms,down_after=30s (max is "
        f"needed; the others are the defaults), with counts from 1 to 9999 and times in ms, s or m; found {what} in "
        f"'{text}'"
    )


def test_models_with_sequences_several_groups_or_gpus_are_refused() -> None:
    made = config("max=4")
    made.instance_group.add(count=1, passive=True)
    assert autoscale_settings(made) == AutoscaleSettings(4)
    made.instance_group.add(count=1)
    with pytest.raises(BadConfig, match="needs one instance group"):
        autoscale_settings(made)
    made = config("max=4")
    made.instance_group[0].gpus.extend([0, 1])
    with pytest.raises(BadConfig, match="on at most one GPU"):
        autoscale_settings(made)
    made = config("max=4")
    made.sequence_batching.SetInParent()
    with pytest.raises(BadConfig, match="a sequence stays on its instance"):
        autoscale_settings(made)
    made = config("max=4")
    made.ensemble_scheduling.SetInParent()
    with pytest.raises(BadConfig, match="'m' is an ensemble"):
        autoscale_settings(made)
