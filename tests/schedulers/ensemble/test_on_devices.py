"""Which outputs of steps stay on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
from kernel.config.spec import EnsembleSpec
from kernel.testing import model_spec
from schedulers.ensemble.plan import EnsemblePlan, OutputsOnDevices
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


Models = dict[str, StepModel]
GPU, CPU, BOTH = StepModel("GPU", "GPU"), StepModel("CPU"), StepModel("GPU", "CPU")


def on_devices(
    *models: StepModel, steps: EnsembleSpec = STEPS, asked: str = "", wanted: str = "", more: Models | None = None
) -> list[str]:
    """Return the outputs of all steps that stay on a device.

    `asked` are the requested outputs, of which the caller takes `wanted` there; `more` are models of nested ensembles.
    """
    plan = EnsemblePlan(spec_of("e", "A", "Y Z", ensemble=steps), steps)

    def find(name: str, version: str, namespace: str) -> Any:
        return (more or {}).get(name)

    found = OutputsOnDevices(plan, [cast("Model", model) for model in models], find)
    requested = [RequestedOutput(name, on_device=name in wanted.split()) for name in asked.split()]
    route = plan.route(requested)
    outputs = found.asked(route, requested)
    assert found.asked(route, requested) is outputs
    return [f"{step.model_name}.{o.name}" for step, each in zip(steps.steps, outputs, strict=True)
            for o in each if o.on_device]  # fmt: skip


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


def test_outputs_of_the_ensemble_stay_there_for_a_caller_that_takes_them_there() -> None:
    assert on_devices(GPU, GPU, GPU, asked="Y Z", wanted="Y Z") == [
        "first.OUT",
        "first.MORE",
        "second.OUT",
        "third.OUT",
    ]
    assert on_devices(CPU, GPU, CPU, asked="Y Z", wanted="Y Z") == ["second.OUT"]
    assert on_devices(CPU, GPU, GPU, asked="Y Z", wanted="Y") == ["second.OUT"]
    assert on_devices(CPU, GPU, StepModel("GPU", decoupled=True), asked="Y Z", wanted="Y Z") == []


def test_an_output_of_the_ensemble_that_a_step_reads_as_well_comes_to_the_host() -> None:
    again = step("third", {"IN": "Y"}, {"OUT": "Z"})
    steps = EnsembleSpec((*STEPS.steps[:2], again))
    assert on_devices(GPU, GPU, GPU, steps=steps, asked="Y Z", wanted="Y Z") == ["first.OUT", "third.OUT"]


#: A, B → C, D
INNER = EnsembleSpec((step("one", {"IN": "A"}, {"OUT": "C"}), step("two", {"IN": "B"}, {"OUT": "D"})))


def nested(spec: EnsembleSpec = INNER, inputs: str = "A B", outputs: str = "C D", **more: Any) -> StepModel:
    model = StepModel()
    model.spec = msgspec.structs.replace(spec_of("inner", inputs, outputs, ensemble=spec), **more)
    return model


def test_a_nested_ensemble_takes_inputs_there_that_one_step_on_a_gpu_reads() -> None:
    steps = EnsembleSpec((STEPS.steps[0], step("inner", {"A": "b", "B": "c"}, {"C": "Y", "D": "Z"})))
    assert on_devices(GPU, nested(), steps=steps, more={"one": GPU, "two": GPU}) == ["first.OUT", "first.MORE"]
    assert on_devices(GPU, nested(), steps=steps, more={"one": BOTH, "two": GPU}) == ["first.MORE"]
    assert on_devices(GPU, nested(), steps=steps, more={"one": GPU}) == ["first.OUT"]
    for refusing in (nested(response_cache=True), nested(decoupled=True)):
        assert on_devices(GPU, refusing, steps=steps, more={"one": GPU, "two": GPU}) == []


def test_a_nested_ensemble_takes_no_input_there_that_is_needed_twice() -> None:
    steps = EnsembleSpec((STEPS.steps[0], step("inner", {"A": "b"}, {"D": "Y", "C": "Z"})))
    twice = EnsembleSpec((INNER.steps[0], step("two", {"IN": "A"}, {"OUT": "D"})))
    assert on_devices(GPU, nested(twice, "A"), steps=steps, more={"one": GPU, "two": GPU}) == []
    passed_on = EnsembleSpec((step("one", {"IN": "A"}, {"OUT": "D"}),))
    assert on_devices(GPU, nested(passed_on, "A", "A D"), steps=steps, more={"one": GPU}) == []
    assert on_devices(GPU, nested(passed_on, "A", "D"), steps=steps, more={"one": GPU}) == ["first.OUT"]


def test_outputs_of_a_nested_ensemble_stay_there_if_one_of_its_steps_may_leave_them() -> None:
    steps = EnsembleSpec((step("inner", {"A": "A"}, {"C": "b"}), STEPS.steps[1]))
    assert on_devices(nested(), GPU, steps=steps, asked="Y", more={"one": GPU, "two": CPU}) == ["inner.C"]
    assert on_devices(nested(), GPU, steps=steps, asked="Y", more={"one": CPU}) == []
