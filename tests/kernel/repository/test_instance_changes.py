"""Instances that are added and removed while their version serves."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from kernel.errors import ModelLoadFailed
from kernel.repository.gpus import GpuOptions, NoGpus, UsableGpus
from kernel.repository.settings import LifecycleSettings
from kernel.serving.catalog import IndexItem
from schedulers.direct import direct
from tests.kernel.repository_lab import CONFIG, RepositoryLab, run, settled, until

if TYPE_CHECKING:
    from pathlib import Path


def group(count: int, more: str = "") -> str:
    return CONFIG + f"instance_group [{{ count: {count} {more} }}]"


def test_instances_are_added_and_removed_while_the_version_serves(lab: RepositoryLab) -> None:
    lab.write("m", config=group(1))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        serving, statistics = lab.catalog.resolve("m"), lab.catalog.resolve("m").statistics
        lab.gate = asyncio.Event()
        lab.write("m", config=group(3))
        load = asyncio.ensure_future(lab.lifecycle.load("m"))
        await until(lambda: len(lab.keepers) == 3)
        await settled()
        assert [item.state for item in lab.catalog.index()] == ["READY"]
        assert serving.instances.count == 1
        lab.gate.set()
        await load
        assert lab.catalog.resolve("m") is serving
        assert serving.statistics is statistics
        assert serving.instances.count == 3
        assert serving.config.instance_group[0].count == 3
        assert lab.alive == ["m_0_0", "m_0_1", "m_0_2"]
        assert all(json.loads(keeper.config)["instance_group"][0]["count"] == 3 for keeper in lab.keepers)
        lab.write("m", config=group(1))
        await lab.lifecycle.load("m")
        await settled()
        assert lab.catalog.resolve("m") is serving
        assert serving.instances.count == 1
        assert lab.alive == ["m_0_0"]
        assert not lab.keepers[0].stopped, "the instance that stays was replaced"
        assert [item.state for item in lab.catalog.index()] == ["READY"]

    run(lab, scenario)


def test_instances_that_a_load_takes_away_are_finalized_before_it_ends(lab: RepositoryLab) -> None:
    lab.write("m", config=group(3))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        lab.keepers[2].finished = asyncio.Event()
        lab.write("m", config=group(1))
        load = asyncio.ensure_future(lab.lifecycle.load("m"))
        await until(lambda: lab.keepers[1].stopped)
        assert lab.catalog.resolve("m").instances.count == 1
        assert not load.done(), "an instance still executes"
        lab.keepers[2].finished.set()
        await load
        assert lab.keepers[2].stopped

    run(lab, scenario)


def test_a_removed_instance_that_executes_for_long_finishes_its_batches_after_the_load_has_ended(
    lab: RepositoryLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.write("m", config=group(2))
    monkeypatch.setattr("kernel.repository.retirement.FINALIZED_WAIT_S", 0.001)

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        removed = lab.keepers[1]
        removed.finished = asyncio.Event()
        lab.write("m", config=group(1))
        await lab.lifecycle.load("m")
        await settled()
        assert lab.catalog.resolve("m").instances.count == 1
        assert not removed.stopped
        removed.finished.set()
        await settled()
        assert removed.stopped

    run(lab, scenario)


def test_after_a_failed_instance_change_the_old_instances_still_serve(lab: RepositoryLab) -> None:
    lab.write("m", config=group(2))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        serving = lab.catalog.resolve("m")
        lab.write("m", config=group(4))
        lab.failure = "no luck"
        for _ in range(2):
            with pytest.raises(ModelLoadFailed) as caught:
                await lab.lifecycle.load("m")
            assert caught.value.message == (
                "load failed for model 'm': version 1 is at READY state: Internal: no luck;\n"
            )
        assert lab.catalog.resolve("m") is serving
        assert lab.catalog.index() == [IndexItem("m", "1", "READY", "Internal: no luck")], "as in Triton"
        assert serving.config.instance_group[0].count == serving.instances.count == 2
        assert lab.alive == ["m_0_0", "m_0_1"]
        lab.failure = ""
        await lab.lifecycle.load("m")
        assert serving.instances.count == 4
        assert lab.catalog.index() == [IndexItem("m", "1", "READY")]

    run(lab, scenario)


WARM = 'model_warmup [{ name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: 1 %s } } }]'


def test_only_new_instances_run_the_warm_up_and_before_they_take_requests(lab: RepositoryLab) -> None:
    warm = WARM % "zero_data: true"
    lab.write("m", config=group(1) + warm)

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        serving = lab.catalog.resolve("m")
        lab.write("m", config=group(2) + warm)
        lab.refusal = "boom"
        with pytest.raises(
            ModelLoadFailed, match="READY state: Invalid argument: failed to run warmup sample 'w': boom; ;"
        ):
            await lab.lifecycle.load("m")
        assert serving.instances.count == 1
        lab.refusal = ""
        await lab.lifecycle.load("m")
        assert serving.instances.count == 2
        kept, _, added = [keeper.instance for keeper in lab.keepers]
        assert kept is not None
        assert added is not None
        assert kept.executed == added.executed == [[bytes(4)]]

    run(lab, scenario)


@pytest.mark.parametrize("changed", ["1/model.txt", "labels.txt", "2/model.txt", "config.pbtxt"])
def test_a_version_is_reloaded_if_its_files_or_other_settings_have_changed(lab: RepositoryLab, changed: str) -> None:
    policy = "version_policy { specific { versions: 1 } }"
    lab.write("m", (1, 2), group(1) + policy)

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        serving = lab.catalog.resolve("m")
        lab.write("m", config=group(2) + policy)
        if changed == "config.pbtxt":
            lab.write("m", config=group(2) + policy + "max_batch_size: 4")
        else:
            (lab.root / "m" / changed).touch()
        await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m").instances.count == 2
        assert (lab.catalog.resolve("m") is serving) == (changed == "2/model.txt")

    run(lab, scenario)


def test_adding_a_version_does_not_reload_the_other(lab: RepositoryLab) -> None:
    lab.write("m", (1, 2), CONFIG)

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        second = lab.catalog.resolve("m", "2")
        lab.write("m", (1, 2), CONFIG + "version_policy { all { } }")
        await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m", "2") is second
        assert lab.catalog.resolve("m", "1").config == second.config
        lab.write("m", (1, 2), CONFIG + "version_policy { specific { versions: 1 } }")
        await lab.lifecycle.load("m")
        await settled()
        assert len(lab.alive) == 1

    run(lab, scenario)


def test_the_configuration_of_a_load_request_applies_until_the_files_change(lab: RepositoryLab) -> None:
    tensor = {"data_type": "TYPE_FP32", "dims": [1]}
    config = {
        "backend": "identity",
        "input": [{"name": "IN", **tensor}],
        "output": [{"name": "OUT", **tensor}],
        "instance_group": [{"count": 3}],
    }
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        serving = lab.catalog.resolve("m")
        await lab.lifecycle.load("m", {"config": json.dumps(config)})
        assert serving.instances.count == 3
        await lab.lifecycle.load("m")
        await settled()
        assert serving.instances.count == 3
        (lab.root / "m" / "config.pbtxt").touch()
        await lab.lifecycle.load("m")
        await settled()
        assert serving.instances.count == 1
        assert lab.catalog.resolve("m") is serving

    run(lab, scenario)


class OneGpu(NoGpus):
    """A server with a GPU, on which every backend can compute."""

    possible = True
    visible = "GPU-0"

    async def usable(self) -> UsableGpus:
        return UsableGpus.first(1)

    async def check_room(self, instance: str, device_id: int) -> None:
        """There is room."""


def on_gpu(count: int, more: str = "") -> str:
    return group(count, "kind: KIND_GPU gpus: [0]").replace('"identity"', '"onnxruntime"') + more


@pytest.mark.parametrize("instances", ["threads", "processes"])
def test_instances_on_a_gpu_share_a_process_with_those_of_the_same_load(tmp_path: Path, instances: str) -> None:
    gpus = OneGpu(GpuOptions(instances=instances).settings())
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), explicit=True, gpus=gpus))
    lab.write("m", config=on_gpu(2))

    def workers() -> list[str]:
        alive = [keeper for keeper in lab.keepers if keeper.plan is not None and not keeper.stopped]
        return [keeper.plan.needs.worker for keeper in alive if keeper.plan is not None]

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        assert [keeper.worker for keeper in lab.keepers[:1]] == [""], "the first worker completes the configuration"
        first = "m:1:gpu_0:1" if instances == "threads" else ""
        assert workers() == [first] * 2
        lab.write("m", config=on_gpu(3))
        await lab.lifecycle.load("m")
        assert workers() == [first] * 3
        lab.write("m", config=on_gpu(3, "max_batch_size: 2"))  # a new load: the instances before serve meanwhile
        await lab.lifecycle.load("m")
        await until(lambda: len(workers()) == 3)
        assert workers() == ["m:1:gpu_0:2" if instances == "threads" else ""] * 3

    run(lab, scenario)
