"""Which ensembles are loaded with which models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kernel.errors import ModelLoadFailed
from kernel.repository.ensembles import in_order
from kernel.repository.settings import LifecycleSettings
from kernel.serving.events import Submitted
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from schedulers.registry import choose_scheduler
from tests.kernel.repository_lab import RepositoryLab, run, settled

if TYPE_CHECKING:
    from pathlib import Path


def ensemble(*models: str) -> str:
    """The configuration of a chain of models."""
    tensors = ["A", *(f"t{number}" for number in range(1, len(models))), "Z"]
    steps = ", ".join(
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "{"A" if model.startswith("e") else "IN"}" '
        f'value: "{source}" }} output_map {{ key: "{"Z" if model.startswith("e") else "OUT"}" value: "{target}" }} }}'
        for model, source, target in zip(models, tensors, tensors[1:], strict=False)
    )
    return f"""
platform: "ensemble"
input [{{ name: "A" data_type: TYPE_FP32 dims: [1] }}]
output [{{ name: "Z" data_type: TYPE_FP32 dims: [1] }}]
ensemble_scheduling {{ step [{steps}] }}
"""


class NoCaller:
    """Ensembles of these tests get no requests."""

    generation = 0


def schedule(spec: object, inbox: object, instances: object, clock: object) -> object:
    return choose_scheduler(spec, inbox, instances, clock, caller=NoCaller())  # type: ignore[arg-type]  # never called


@pytest.fixture
def lab(tmp_path: Path) -> RepositoryLab:
    made = RepositoryLab(tmp_path, schedule)  # type: ignore[arg-type]  # a scheduler
    for name in ("m", "n"):
        made.write(name)
    made.write("e", config=ensemble("m", "n"))
    made.write("ee", config=ensemble("e", "m"))
    return made


def states(lab: RepositoryLab) -> dict[str, str]:
    return {item.name: item.state for item in lab.catalog.index() if item.state}


def test_ensembles_are_ordered_behind_the_ensembles_that_they_use() -> None:
    parts = {"c": ("b", "x"), "a": ("y",), "b": ("a",)}
    assert in_order(parts) == ["a", "b", "c"]
    assert sorted(in_order({"p": ("q",), "q": ("p",)})) == ["p", "q"]


def test_all_models_of_a_repository_are_loaded_and_ensembles_last(tmp_path: Path) -> None:
    lab = RepositoryLab(tmp_path, schedule, LifecycleSettings((tmp_path,)))  # type: ignore[arg-type]  # a scheduler
    lab.write("e", config=ensemble("m", "n"))
    lab.write("ee", config=ensemble("e"))
    lab.write("m")
    lab.write("n")

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start() == []
        assert states(lab) == dict.fromkeys(("e", "ee", "m", "n"), "READY")

    run(lab, scenario)


def test_loading_an_ensemble_loads_its_models_and_unloading_leaves_them(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("ee")
        assert states(lab) == dict.fromkeys(("e", "ee", "m", "n"), "READY")
        await lab.lifecycle.unload("ee")
        await settled()
        assert states(lab) == {"e": "READY", "ee": "UNAVAILABLE", "m": "READY", "n": "READY"}

    run(lab, scenario)


def test_unload_dependents_also_unloads_models_that_nobody_asked_for(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        await lab.lifecycle.load("ee")
        await lab.lifecycle.unload("ee", unload_dependents=True)
        await settled()
        assert states(lab) == {"e": "UNAVAILABLE", "ee": "UNAVAILABLE", "m": "READY", "n": "UNAVAILABLE"}

    run(lab, scenario)


def test_an_ensemble_goes_and_comes_with_its_models(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("ee")
        await lab.lifecycle.unload("n")
        await settled()
        assert states(lab) == {"e": "UNAVAILABLE", "ee": "UNAVAILABLE", "m": "READY", "n": "UNAVAILABLE"}
        await lab.lifecycle.load("n")
        assert states(lab) == dict.fromkeys(("e", "ee", "m", "n"), "READY")

    run(lab, scenario)


def test_an_ensemble_that_was_unloaded_on_request_does_not_come_back(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("e")
        await lab.lifecycle.unload("e")
        await lab.lifecycle.unload("n")
        await lab.lifecycle.load("n")
        await settled()
        assert states(lab)["e"] == "UNAVAILABLE"

    run(lab, scenario)


def test_an_ensemble_that_no_longer_fits_is_unloaded_until_it_fits_again(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("e")
        config = 'backend: "identity" input [{ name: "OTHER" data_type: TYPE_FP32 dims: [1] }] '
        lab.write("n", config=config + 'output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]')
        await lab.lifecycle.load("n")
        await settled()
        assert states(lab) == {"e": "UNAVAILABLE", "m": "READY", "n": "READY"}
        lab.write("n")
        await lab.lifecycle.load("n")
        assert states(lab) == {"e": "READY", "m": "READY", "n": "READY"}

    run(lab, scenario)


def test_an_ensemble_is_loaded_again_when_a_model_of_it_was_replaced_and_not_otherwise(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("e")
        before = lab.catalog.resolve("e")
        await lab.lifecycle.load("e")
        assert lab.catalog.resolve("e") is before
        lab.write("m", versions=(1, 2))
        await lab.lifecycle.load("e")
        assert lab.catalog.resolve("m").version == 2
        assert lab.catalog.resolve("e") is not before

    run(lab, scenario)


def test_the_error_of_a_model_says_why_the_ensemble_cannot_be_loaded(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        lab.fail("n", 1, "no weights")
        with pytest.raises(ModelLoadFailed) as caught:
            await lab.lifecycle.load("ee")
        cause = (
            "ensemble 'e' depends on 'n' which has no loaded version. Model 'n' loading failed with error: version 1 "
            "is at UNAVAILABLE state: Internal: no weights;"
        )
        assert caught.value.message == (
            "load failed for model 'ee': ensemble 'ee' depends on 'e' which is not valid. Model 'e' failed with error: "
            f"{cause}\n"
        )

    run(lab, scenario)


def test_an_ensemble_that_failed_for_a_model_is_loaded_as_soon_as_the_model_is(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        lab.fail("n", 1, "no weights")
        with pytest.raises(ModelLoadFailed):
            await lab.lifecycle.load("e")
        (lab.root / "n" / "1" / "fail").unlink()
        await lab.lifecycle.load("n")
        assert states(lab) == {"e": "READY", "m": "READY", "n": "READY"}

    run(lab, scenario)


def test_a_circle_is_refused_and_its_other_models_are_not_waited_for(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        lab.write("e1", config=ensemble("e2"))
        lab.write("e2", config=ensemble("e1"))
        with pytest.raises(ModelLoadFailed) as caught:
            await lab.lifecycle.load("e1")
        assert caught.value.message == (
            "load failed for model 'e1': circular dependency between ensembles: e1 -> ... -> e2 -> e1\n"
        )

    run(lab, scenario)


def test_ensembles_that_need_one_another_s_models_are_loaded_at_the_same_time(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(lab.lifecycle.load(name) for name in ("ee", "e", "n", "m")))
        assert states(lab) == dict.fromkeys(("e", "ee", "m", "n"), "READY")

    run(lab, scenario)


def test_a_pinned_version_is_not_ended_before_it_is_free(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        model = lab.catalog.resolve("m")
        model.pin()
        await lab.lifecycle.unload("m")
        await settled()
        assert lab.alive == ["m_0"]
        sink = RecordingSink()
        request = Request("m", [], sink)
        model.live.add(request)
        request.owner = model
        model.inbox.post(Submitted(request))
        model.unpin()
        await settled()
        assert lab.alive == ["m_0"], "it still has a request"
        request.fail(ModelLoadFailed("done"))
        await settled()
        assert lab.alive == []

    run(lab, scenario)
