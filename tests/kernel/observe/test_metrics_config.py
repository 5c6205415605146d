from __future__ import annotations

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import BadOption
from kernel.observe.metrics_config import (
    DEFAULT_BUCKETS,
    DEFAULT_QUANTILES,
    FIRST_RESPONSE,
    REQUEST_DURATION,
    MetricsConfig,
    buckets_of,
    parse_metrics_config,
)


def test_without_settings_there_are_counters_only() -> None:
    assert parse_metrics_config(()) == (MetricsConfig(True, False, False, DEFAULT_QUANTILES), [])


def test_each_kind_of_latencies_has_its_own_setting() -> None:
    settings = ("counter_latencies=false", "histogram_latencies=true", "summary_latencies=TRUE")
    assert parse_metrics_config(settings) == (MetricsConfig(False, True, True), [])


@pytest.mark.parametrize("text", ["foo", "=x", "a=", "a,b=c", ""])
def test_a_value_without_setting_is_refused_with_tritons_text(text: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_metrics_config((text,))
    assert str(caught.value) == f"--metrics-config option format is <setting>=<value>. Got {text}"


def test_the_errors_of_quantiles_are_ignored() -> None:
    config, complaints = parse_metrics_config(("summary_quantiles=0.5:0.05,0.9:0.01,0.50:1,1:0",))
    assert (config.quantiles, complaints) == ((0.5, 0.9, 1.0), [])


def test_wrong_quantiles_are_ignored_with_tritons_texts() -> None:
    config, complaints = parse_metrics_config(("summary_quantiles=0.5:0.05,0.9,x:y,2:3,nan:0.1",))
    assert config.quantiles == (0.5,)
    assert complaints == [
        "Invalid option: [0.9]. No ':' delimiter found. Expected format is <quantile>:<error>",
        "Invalid option: [x:y]. Error: stod",
        "Invalid option: [2:3]. Error: a quantile must be between 0 and 1",
        "Invalid option: [nan:0.1]. Error: a quantile must be between 0 and 1",
    ]


def test_without_a_valid_quantile_the_defaults_apply() -> None:
    config, complaints = parse_metrics_config(("summary_quantiles=0.9",))
    assert (config.quantiles, len(complaints)) == (DEFAULT_QUANTILES, 1)


def test_unknown_settings_and_values_have_no_effect_and_cause_log_lines() -> None:
    config, complaints = parse_metrics_config(("nonsense=1", "summary_latencies=yes"))
    assert config == MetricsConfig()
    assert complaints == [
        "--metrics-config setting 'nonsense' is unknown and has no effect; settings are counter_latencies, "
        "histogram_latencies, summary_latencies, summary_quantiles",
        "--metrics-config setting 'summary_latencies' must be true or false, 'yes' has no effect",
    ]


def test_a_model_sets_the_buckets_of_its_histograms() -> None:
    config = ModelConfig()
    for family, buckets in ((FIRST_RESPONSE, [1, 2.5]), ("nv_nope", [3])):
        control = config.model_metrics.metric_control.add()
        control.metric_identifier.family = family
        control.histogram_options.buckets.extend(buckets)
    buckets_by_family, complaints = buckets_of(config)
    assert buckets_by_family[FIRST_RESPONSE] == (1, 2.5)
    assert buckets_by_family[REQUEST_DURATION] == DEFAULT_BUCKETS[REQUEST_DURATION]
    assert complaints == ["Metric family 'nv_nope' in 'metric_identifier' is not a customizable metric in Triton core."]
