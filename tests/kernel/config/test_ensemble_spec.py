"""The steps of an ensemble as the scheduler sees them."""

from __future__ import annotations

from kernel.config.ensemble_spec import EnsembleSpec, EnsembleStep, ensemble_spec
from kernel.config.generated.model_config_pb2 import ModelConfig


def test_a_model_without_steps_has_no_ensemble_spec() -> None:
    assert ensemble_spec(ModelConfig(name="m")) is None


def test_versions_and_maps_are_as_requests_need_them() -> None:
    config = ModelConfig(name="e", platform="ensemble")
    config.ensemble_scheduling.max_inflight_requests = 3
    for version in (-1, 0, 7):
        step = config.ensemble_scheduling.step.add(model_name=f"m{version % 2}", model_version=version)
        step.input_map["IN"] = "A"
        step.output_map["OUT"] = "Z"
    found = ensemble_spec(config)
    assert found == EnsembleSpec(
        tuple(
            EnsembleStep(name, version, {"IN": "A"}, {"OUT": "Z"})
            for name, version in (("m1", ""), ("m0", "0"), ("m1", "7"))
        ),
        3,
    )
    assert found.models == ("m1", "m0")
