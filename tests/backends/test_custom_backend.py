"""The seven steps of a backend that is made of three classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import Backend, CustomBackend, CustomInstance, CustomModel, ModelArguments
from backends.custom_backend import as_backend
from backends.worker.request import OutputValue
from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import Config, Timings
    from backends.worker.request import WorkerRequest
    from tests.backends.conftest import Lab

#: The steps in the order in which they were done.
steps: list[str] = []
#: The step that fails.
failing: list[str] = []


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    steps.clear()
    failing.clear()
    yield
    steps.clear()


def step(name: str) -> None:
    steps.append(name)
    if name in failing:
        raise RuntimeError(f"{name} failed")


class NotedModel(CustomModel):
    def complete(self) -> Config:
        step("complete")
        return {**self.arguments.config, "max_batch_size": 4}

    def initialize(self) -> None:
        step("model +")

    def finalize(self) -> None:
        step("model -")


class NotedInstance(CustomInstance):
    def initialize(self) -> None:
        step(f"instance + {self.arguments.instance_name}")

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        step("execute")
        for request in requests:
            request.respond([OutputValue("OUT", "FP32", request.inputs[0].as_numpy())])

    def finalize(self) -> None:
        step("instance -")


class NotedBackend(CustomBackend):
    instance_class = NotedInstance
    model_class = NotedModel
    shares_worker = True

    def initialize(self) -> None:
        step(f"backend + {self.settings.get('speed')}")

    def finalize(self) -> None:
        step("backend -")


def arguments(instance: str = "m_0", **config: Any) -> ModelArguments:
    return ModelArguments({"name": "m", **config}, Path("m"), 1, instance, backend_config={"speed": "9"})


def test_the_steps_of_a_life_come_in_their_order(lab: Lab) -> None:
    backend = as_backend(NotedBackend, "noted")(lab)
    assert backend.complete(arguments(""))["max_batch_size"] == 4
    backend.load(arguments())
    request = lab.request({"IN": np.ones(1, np.float32)})
    backend.execute([request], lab.timings)
    backend.finalize()
    assert lab.outputs(request)["OUT"].tolist() == [1]
    assert steps == [
        "backend + 9", "complete", "model +", "instance + m_0", "execute", "instance -", "model -", "backend -",
    ]  # fmt: skip


def test_models_of_one_process_share_their_backend(lab: Lab) -> None:
    noted = as_backend(NotedBackend, "noted")
    first, second = noted(lab), noted(lab)
    first.load(arguments("m_0"))
    second.load(arguments("m_1"))
    first.finalize()
    assert steps == ["backend + 9", "model +", "instance + m_0", "model +", "instance + m_1", "instance -", "model -"]
    second.finalize()
    assert steps[-3:] == ["instance -", "model -", "backend -"]


@pytest.mark.parametrize(
    ("fails", "undone"),
    [
        ("backend + 9", []),
        ("model +", ["backend -"]),
        ("instance + m_0", ["model -", "backend -"]),
    ],
)
def test_after_a_failed_step_the_earlier_ones_are_finalized(lab: Lab, fails: str, undone: list[str]) -> None:
    failing.append(fails)
    backend = as_backend(NotedBackend, "noted")(lab)
    with pytest.raises(RuntimeError, match="failed"):
        backend.load(arguments())
    backend.finalize()
    assert steps[steps.index(fails) + 1 :] == undone


def test_an_error_in_a_finalize_is_logged_and_the_others_follow(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    failing.append("model -")
    backend = as_backend(NotedBackend, "noted")(lab)
    backend.load(arguments())
    backend.finalize()
    assert steps[-1] == "backend -"
    assert "the backend failed in NotedModel.finalize" in caplog.text


def test_the_worker_sees_what_the_backend_can(lab: Lab) -> None:
    noted = as_backend(NotedBackend, "noted")
    assert noted.shares_worker
    assert not noted.responds_later
    assert as_backend(noted, "itself") is noted


@pytest.mark.parametrize(("of_backend", "of_instance", "expected"), [
    (False, None, False), (True, None, True), (True, False, False), (False, True, True),
])  # fmt: skip
def test_the_instance_decides_whether_it_takes_inputs_on_a_device_or_the_backend_does(
    lab: Lab, of_backend: bool, of_instance: bool | None, expected: bool
) -> None:
    class Instance(NotedInstance):
        def initialize(self) -> None:
            self.device_inputs = of_instance

    class WithDevice(NotedBackend):
        instance_class = Instance
        device_inputs = of_backend

    backend = as_backend(WithDevice, "noted")(lab)
    backend.load(arguments())
    backend.finalize()
    assert backend.device_inputs is expected


def test_what_is_no_backend_is_refused() -> None:
    class Bare(CustomBackend):
        pass

    for found, text in (
        (dict, "'here' must be a subclass of .*Backend or .*CustomBackend, got dict"),
        (7, "got int"),
        (Bare, "must name the class of its instances: instance_class, a CustomInstance"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            as_backend(found, "'here'")
    assert issubclass(as_backend(NotedBackend, ""), Backend)
