"""Instances that come and go while their version serves."""

from __future__ import annotations

import asyncio
import json

import pytest

from kernel.errors import ModelLoadFailed
from kernel.repository.testing import CONFIG, RepositoryLab, run, settled, until
from kernel.serving.catalog import IndexItem


def group(count: int, more: str = "") -> str:
    return CONFIG + f"instance_group [{{ count: {count} {more} }}]"


def test_instances_come_and_go_while_the_version_serves(bench: RepositoryLab) -> None:
    bench.write("m", config=group(1))

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        serving, statistics = bench.catalog.resolve("m"), bench.catalog.resolve("m").statistics
        bench.gate = asyncio.Event()
        bench.write("m", config=group(3))
        load = asyncio.ensure_future(bench.lifecycle.load("m"))
        await until(lambda: len(bench.keepers) == 3)
        await settled()
        assert [item.state for item in bench.catalog.index()] == ["READY"]
        assert serving.instances.count == 1
        bench.gate.set()
        await load
        assert bench.catalog.resolve("m") is serving
        assert serving.statistics is statistics
        assert serving.instances.count == 3
        assert serving.config.instance_group[0].count == 3
        assert bench.alive == ["m_0_0", "m_0_1", "m_0_2"]
        assert all(json.loads(keeper.config)["instance_group"][0]["count"] == 3 for keeper in bench.keepers)
        bench.write("m", config=group(1))
        await bench.lifecycle.load("m")
        await settled()
        assert bench.catalog.resolve("m") is serving
        assert serving.instances.count == 1
        assert bench.alive == ["m_0_0"]
        assert not bench.keepers[0].stopped, "it was there all the time"
        assert [item.state for item in bench.catalog.index()] == ["READY"]

    run(bench, scenario)


def test_an_instance_that_goes_finishes_first_and_nobody_waits_for_it(bench: RepositoryLab) -> None:
    bench.write("m", config=group(2))

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        going = bench.keepers[1]
        going.finished = asyncio.Event()
        bench.write("m", config=group(1))
        await bench.lifecycle.load("m")
        await settled()
        assert bench.catalog.resolve("m").instances.count == 1
        assert not going.stopped
        going.finished.set()
        await settled()
        assert going.stopped

    run(bench, scenario)


def test_an_instance_that_cannot_be_added_leaves_those_that_serve(bench: RepositoryLab) -> None:
    bench.write("m", config=group(2))

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        bench.write("m", config=group(4))
        bench.failure = "no luck"
        for _ in range(2):
            with pytest.raises(ModelLoadFailed) as caught:
                await bench.lifecycle.load("m")
            assert caught.value.message == (
                "load failed for model 'm': version 1 is at READY state: Internal: no luck;\n"
            )
        assert bench.catalog.resolve("m") is serving
        assert bench.catalog.index() == [IndexItem("m", "1", "READY", "Internal: no luck")], "Triton tells it, too"
        assert serving.config.instance_group[0].count == serving.instances.count == 2
        assert bench.alive == ["m_0_0", "m_0_1"]
        bench.failure = ""
        await bench.lifecycle.load("m")
        assert serving.instances.count == 4
        assert bench.catalog.index() == [IndexItem("m", "1", "READY")]

    run(bench, scenario)


WARM = 'model_warmup [{ name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: 1 %s } } }]'


def test_only_new_instances_are_warmed_up_and_before_they_take_requests(bench: RepositoryLab) -> None:
    warm = WARM % "zero_data: true"
    bench.write("m", config=group(1) + warm)

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        bench.write("m", config=group(2) + warm)
        bench.refusal = "boom"
        with pytest.raises(
            ModelLoadFailed, match="READY state: Invalid argument: failed to run warmup sample 'w': boom; ;"
        ):
            await bench.lifecycle.load("m")
        assert serving.instances.count == 1
        bench.refusal = ""
        await bench.lifecycle.load("m")
        assert serving.instances.count == 2
        kept, _, added = [keeper.instance for keeper in bench.keepers]
        assert kept is not None
        assert added is not None
        assert kept.executed == added.executed == [[bytes(4)]]

    run(bench, scenario)


@pytest.mark.parametrize("changed", ["1/model.txt", "labels.txt", "2/model.txt", "config.pbtxt"])
def test_what_the_version_was_loaded_from_decides_whether_it_is_loaded_again(
    bench: RepositoryLab, changed: str
) -> None:
    policy = "version_policy { specific { versions: 1 } }"
    bench.write("m", (1, 2), group(1) + policy)

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        bench.write("m", config=group(2) + policy)
        if changed == "config.pbtxt":
            bench.write("m", config=group(2) + policy + "max_batch_size: 4")
        else:
            (bench.root / "m" / changed).touch()
        await bench.lifecycle.load("m")
        assert bench.catalog.resolve("m").instances.count == 2
        assert (bench.catalog.resolve("m") is serving) == (changed == "2/model.txt")

    run(bench, scenario)


def test_a_version_that_stays_is_not_loaded_again_for_one_that_comes(bench: RepositoryLab) -> None:
    bench.write("m", (1, 2), CONFIG)

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        second = bench.catalog.resolve("m", "2")
        bench.write("m", (1, 2), CONFIG + "version_policy { all { } }")
        await bench.lifecycle.load("m")
        assert bench.catalog.resolve("m", "2") is second
        assert bench.catalog.resolve("m", "1").config == second.config
        bench.write("m", (1, 2), CONFIG + "version_policy { specific { versions: 1 } }")
        await bench.lifecycle.load("m")
        await settled()
        assert len(bench.alive) == 1

    run(bench, scenario)


def test_a_configuration_of_a_load_request_changes_instances_until_the_next_load(bench: RepositoryLab) -> None:
    tensor = {"data_type": "TYPE_FP32", "dims": [1]}
    config = {
        "backend": "identity",
        "input": [{"name": "IN", **tensor}],
        "output": [{"name": "OUT", **tensor}],
        "instance_group": [{"count": 3}],
    }
    bench.write("m")

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        await bench.lifecycle.load("m", {"config": json.dumps(config)})
        assert serving.instances.count == 3
        await bench.lifecycle.load("m")
        await settled()
        assert serving.instances.count == 1
        assert bench.catalog.resolve("m") is serving

    run(bench, scenario)
