from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.load import from_json
from kernel.config.to_text import to_dict, to_json

if TYPE_CHECKING:
    from collections.abc import Callable

#: Configurations, and the JSON that a Triton 2.51.0 server returned for them.
RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.json")))
def test_the_json_equals_triton_s_byte_for_byte(name: str, prepared: Callable[..., ModelConfig]) -> None:
    config = prepared((RECORDED / f"{name}.pbtxt").read_text(), name=name)
    assert to_json(config) == (RECORDED / f"{name}.json").read_text()


def test_the_dict_is_the_parsed_text(prepared: Callable[..., ModelConfig]) -> None:
    config = prepared((RECORDED / "everything.pbtxt").read_text(), name="everything")
    assert to_dict(config) == json.loads(to_json(config))


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.json")))
def test_written_json_parses_to_the_same_configuration(name: str, prepared: Callable[..., ModelConfig]) -> None:
    config = prepared((RECORDED / f"{name}.pbtxt").read_text(), name=name)
    assert from_json(to_json(config), "") == config


def test_an_ensemble_shows_versions_as_numbers_and_maps_in_order() -> None:
    config = ModelConfig(name="e", platform="ensemble")
    step = config.ensemble_scheduling.step.add(model_name="m", model_version=-1)
    step.input_map.update({"B": "b", "A": "a"})
    assert to_dict(config)["ensemble_scheduling"] == {
        "step": [
            {
                "model_name": "m",
                "model_version": -1,
                "input_map": {"A": "a", "B": "b"},
                "output_map": {},
                "model_namespace": "",
            }
        ],
    }
    assert '"input_map":{"A":"a","B":"b"}' in to_json(config)
    config.ensemble_scheduling.max_inflight_requests = 3
    assert to_dict(config)["ensemble_scheduling"]["max_inflight_requests"] == 3


def test_64_bit_numbers_keep_their_value() -> None:
    config = ModelConfig(name="m")
    config.dynamic_batching.max_queue_delay_microseconds = 2**64 - 1
    assert to_dict(config)["dynamic_batching"]["max_queue_delay_microseconds"] == 2**64 - 1


def test_fractions_have_as_few_digits_as_possible() -> None:
    config = ModelConfig()
    control = config.sequence_batching.control_input.add(name="C").control.add()
    # The last number is the largest 32-bit float; rounding to 6 digits would exceed the 32-bit range.
    control.fp32_false_true.extend([0.1, 2.0, 16777216.0, 3.4028234663852886e38])
    written = to_dict(config)["sequence_batching"]["control_input"][0]["control"][0]["fp32_false_true"]
    assert written == [0.1, 2, 16777216, 3.40282347e38]
    assert isinstance(written[1], int)


def test_nan_and_infinity_are_written_as_text() -> None:
    config = ModelConfig()
    options = config.model_metrics.metric_control.add().histogram_options
    options.buckets.extend([0.1, 1.0, float("inf"), float("-inf"), float("nan")])
    control = config.sequence_batching.control_input.add().control.add()
    control.fp32_false_true.extend([float("inf"), float("nan")])
    written = to_dict(config)
    buckets = written["model_metrics"]["metric_control"][0]["histogram_options"]["buckets"]
    assert buckets == [0.1, 1, "Infinity", "-Infinity", "NaN"]
    assert written["sequence_batching"]["control_input"][0]["control"][0]["fp32_false_true"] == [
        "Infinity",
        "NaN",
    ]


def test_an_enum_number_without_a_name_is_written_as_a_number() -> None:
    config = ModelConfig()
    config.batch_output.add(kind=99)
    assert to_dict(config)["batch_output"] == [{"target_name": [], "kind": 99, "source_input": []}]
