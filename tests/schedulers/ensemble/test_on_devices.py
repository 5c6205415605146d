"""Which outputs of steps stay on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from kernel.config.ensemble_spec import EnsembleSpec
from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
from kernel.testing import model_spec
from schedulers.ensemble.on_devices import OutputsOnDevices
from schedulers.ensemble.plan import EnsemblePlan
from schedulers.testing import spec_of, step
from shm.tensor import RequestedOutput

if TYPE_CHECKING:
    from kernel.serving.model import Model

#: A → b, c; b → Y; c → Z and, with b, again.
STEPS = EnsembleSpec(
    (
        step("first", {"IN": "A"}, {"OUT": "b", "MORE": "c"}),
        step("second", {"IN": "b"}, {"OUT": "Y"}),
        step("third", {"IN": "c"}, {"OUT": "Z"}),
    )
)


class StepModel:
    """As much of a model as is looked at."""

    def __init__(self, *kinds: str, **more: Any) -> None:
        groups = [ModelInstanceGroup(kind=f"KIND_{kind}") for kind in kinds]
        self.config = ModelConfig(instance_group=groups)
        self.spec = msgspec.structs.replace(model_spec(), **more)


GPU, CPU, BOTH = StepModel("GPU", "GPU"), StepModel("CPU"), StepModel("GPU", "CPU")


def on_devices(*models: StepModel, steps: EnsembleSpec = STEPS, asked: str = "") -> list[str]:
    """Return the outputs of all steps that stay on a device."""
    plan = EnsemblePlan(spec_of("e", "A", "Y Z", ensemble=steps), steps)
    found = OutputsOnDevices(plan, [cast("Model", model) for model in models])
    route = plan.route([RequestedOutput(name) for name in asked.split()])
    assert found.asked(route) is found.asked(route)
    return [f"{each.model_name}.{o.name}" for each, outputs in zip(steps.steps, found.asked(route), strict=True)
            for o in outputs if o.on_device]  # fmt: skip


def test_what_one_step_on_a_gpu_reads_stays_there() -> None:
    assert on_devices(GPU, GPU, GPU) == ["first.OUT", "first.MORE"]
    assert on_devices(GPU, GPU, CPU) == ["first.OUT"]
    assert on_devices(BOTH, GPU, BOTH) == ["first.OUT"]
    assert on_devices(CPU, GPU, GPU) == []


def test_what_no_step_reads_for_this_request_does_not_stay() -> None:
    assert on_devices(GPU, GPU, GPU, asked="Y") == ["first.OUT"]


@pytest.mark.parametrize("more", [{"decoupled": True}, {"response_cache": True}], ids=["a stream", "a cache"])
def test_nothing_stays_that_is_read_again_or_needs_its_bytes(more: dict[str, bool]) -> None:
    assert on_devices(StepModel("GPU", **more), GPU, GPU) == []


def test_a_tensor_with_several_readers_comes_to_the_host() -> None:
    twice = step("second", {"IN": "b", "AGAIN": "b"}, {"OUT": "Y"})
    assert on_devices(GPU, GPU, GPU, steps=EnsembleSpec((STEPS.steps[0], twice, STEPS.steps[2]))) == ["first.MORE"]
    both = step("third", {"IN": "c", "AGAIN": "b"}, {"OUT": "Z"})
    assert on_devices(GPU, GPU, GPU, steps=EnsembleSpec((*STEPS.steps[:2], both))) == ["first.MORE"]
