"""Loads are all or nothing, and a failed one never takes a serving version away."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING

import pytest

from kernel.errors import InternalError, InvalidArgument, ModelLoadFailed, ServingError, Unavailable
from kernel.repository.settings import LifecycleSettings
from kernel.repository.testing import CONFIG, RepositoryLab, run, settled, until
from kernel.serving.catalog import IndexItem, ModelState
from schedulers.direct import direct

if TYPE_CHECKING:
    from pathlib import Path


def test_every_model_of_the_repository_is_loaded_at_start(tmp_path: Path) -> None:
    bench = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    bench.write("a")
    bench.write("b", (1, 2))

    async def scenario(bench: RepositoryLab) -> None:
        assert await bench.lifecycle.start() == []
        assert bench.catalog.resolve("b").version == 2
        assert bench.alive == ["a_0", "b_0"]
        with pytest.raises(Unavailable, match="explicit model load / unload is not allowed"):
            await bench.lifecycle.load("a")

    run(bench, scenario)


def test_a_model_that_fails_hurts_no_other_and_says_why(bench: RepositoryLab) -> None:
    bench.write("good")
    bench.write("bad")
    bench.write("worse", config="max_batch_size: many")
    bench.fail("bad", 1, "no luck")

    async def scenario(bench: RepositoryLab) -> None:
        assert await bench.lifecycle.start(["*"]) == ["bad", "worse"]
        index = {item.name: item for item in bench.catalog.index()}
        assert index["good"].state == "READY"
        assert index["bad"] == IndexItem("bad", "1", "UNAVAILABLE", "Internal: no luck")
        assert "config.pbtxt:1:17" in index["worse"].reason
        assert bench.alive == ["good_0"]

    run(bench, scenario)


def test_a_failed_reload_leaves_the_serving_version_alone(bench: RepositoryLab) -> None:
    bench.write("m")

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        for attempt in range(3):
            bench.fail("m", 1, f"no luck {attempt}")
            with pytest.raises(ModelLoadFailed) as caught:
                await bench.lifecycle.load("m")
            assert caught.value.message == (
                f"load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: no luck {attempt};\n"
            )
            assert bench.catalog.resolve("m") is serving
        with pytest.raises(ServingError):
            await bench.lifecycle.load("m", {"config": "{nonsense"})
        assert bench.catalog.resolve("m") is serving
        assert bench.alive == ["m_0"]

    run(bench, scenario)


def test_one_version_that_fails_keeps_the_others_from_being_loaded(bench: RepositoryLab) -> None:
    bench.write("m", (1, 2), CONFIG + "version_policy { all { } }")
    bench.fail("m", 2, "no luck")

    async def scenario(bench: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed):
            await bench.lifecycle.load("m")
        await settled()
        assert [item.state for item in bench.catalog.index()] == ["UNAVAILABLE", "UNAVAILABLE"]
        assert bench.alive == []

    run(bench, scenario)


def test_a_reload_swaps_versions_and_ends_the_old_workers(bench: RepositoryLab) -> None:
    bench.write("m")

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        old = bench.catalog.resolve("m")
        await bench.lifecycle.load("m")
        assert bench.catalog.resolve("m") is old, "nothing had changed"
        bench.write("m", (1, 2))
        await bench.lifecycle.load("m")
        await settled()
        assert bench.catalog.resolve("m").version == 2
        entry = bench.catalog.entry("m", 1)
        assert entry is not None
        assert (entry.state, entry.reason) == (ModelState.UNAVAILABLE, "unloaded")
        assert len(bench.alive) == 1

    run(bench, scenario)


def test_unloading_ends_the_workers_and_is_shown(bench: RepositoryLab) -> None:
    bench.write("m")

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        await bench.lifecycle.unload("m")
        await settled()
        assert bench.catalog.index() == [IndexItem("m", "1", "UNAVAILABLE", "unloaded")]
        assert bench.alive == []
        await bench.lifecycle.unload("never heard of")

    run(bench, scenario)


@pytest.mark.parametrize("name", ["", " ", "..", "a..b", "a/b", ".", "a\0b"])
def test_names_that_are_no_folder_of_the_repository_are_refused(bench: RepositoryLab, name: str) -> None:
    async def scenario(bench: RepositoryLab) -> None:
        with pytest.raises(InvalidArgument):
            await bench.lifecycle.load(name)

    run(bench, scenario)


def test_a_model_that_is_not_there_cannot_be_loaded(bench: RepositoryLab) -> None:
    async def scenario(bench: RepositoryLab) -> None:
        with pytest.raises(InternalError, match="^failed to load 'm', failed to poll from model repository$"):
            await bench.lifecycle.load("m")

    run(bench, scenario)


def test_a_policy_that_leaves_no_version_has_a_text_of_its_own(bench: RepositoryLab) -> None:
    bench.write("m", config=CONFIG + "version_policy { specific { versions: 7 } }")

    async def scenario(bench: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed) as caught:
            await bench.lifecycle.load("m")
        reason = "at least one version must be available under the version policy of model 'm'"
        assert caught.value.message == f"load failed for model 'm': {reason}\n"
        assert await bench.lifecycle.index() == [IndexItem("m", "", "UNAVAILABLE", f"Invalid argument: {reason}")]

    run(bench, scenario)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("max_batch_size: 1 sequence_batching { }", "needs sequence batching"),
        (
            "batch_input [{ kind: BATCH_ELEMENT_COUNT target_name: 'x' data_type: TYPE_FP32 source_input: 'IN' }]",
            "ragged",
        ),
    ],
)
def test_what_this_server_cannot_do_is_refused_with_a_reason(bench: RepositoryLab, config: str, reason: str) -> None:
    bench.write("m", config=CONFIG + config)

    async def scenario(bench: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed, match=reason):
            await bench.lifecycle.load("m")
        assert bench.alive == []

    run(bench, scenario)


# ---- loads ----------------------------------------------------------------------------------


def test_a_load_that_fails_is_tried_again_as_often_as_the_command_line_says(tmp_path: Path) -> None:
    bench = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), explicit=True, load_retry_count=2))
    bench.write("m")
    bench.fail("m", 1, "no luck")

    async def scenario(bench: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed):
            await bench.lifecycle.load("m")
        assert len(bench.keepers) == 3

    run(bench, scenario)


def test_no_more_versions_load_at_once_than_the_command_line_says(tmp_path: Path) -> None:
    bench = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), load_thread_count=2))
    for name in "abc":
        bench.write(name)

    async def scenario(bench: RepositoryLab) -> None:
        bench.gate = asyncio.Event()
        start = asyncio.ensure_future(bench.lifecycle.start())
        await until(lambda: [item.state for item in bench.catalog.index()] == ["LOADING"] * 3)
        await until(lambda: len(bench.alive) == 2)
        await settled()  # the third takes no thread from here to its keeper
        assert len(bench.keepers) == 2
        bench.gate.set()
        assert await start == []
        assert len(bench.keepers) == 3

    run(bench, scenario)


def test_a_client_that_gives_up_does_not_end_its_load(bench: RepositoryLab) -> None:
    bench.write("m")

    async def scenario(bench: RepositoryLab) -> None:
        bench.gate = asyncio.Event()
        load = asyncio.ensure_future(bench.lifecycle.load("m"))
        await until(lambda: bool(bench.alive))
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        bench.gate.set()
        await until(lambda: bench.catalog.index()[0].state == "READY")

    run(bench, scenario)


def test_a_server_that_closes_ends_loads_and_leaves_no_worker(bench: RepositoryLab) -> None:
    bench.write("m")

    async def scenario(bench: RepositoryLab) -> None:
        bench.gate = asyncio.Event()
        load = asyncio.ensure_future(bench.lifecycle.load("m"))
        await until(lambda: bool(bench.alive))
        await bench.lifecycle.close()
        assert isinstance((await asyncio.gather(load, return_exceptions=True))[0], asyncio.CancelledError)

    run(bench, scenario)


def test_a_version_that_is_removed_while_it_loads_goes_on_as_far_as_its_backend_can(bench: RepositoryLab) -> None:
    bench.write("m")

    async def scenario(bench: RepositoryLab) -> None:
        bench.gate = asyncio.Event()
        load = asyncio.ensure_future(bench.lifecycle.load("m"))
        await until(lambda: bool(bench.alive))
        shutil.rmtree(bench.root / "m" / "1")
        bench.gate.set()
        await load
        with pytest.raises(ModelLoadFailed, match="at least one version must be available"):
            await bench.lifecycle.load("m")
        assert bench.catalog.resolve("m").version == 1, "what serves goes on"

    run(bench, scenario)


def test_passive_instances_are_loaded_and_never_asked(bench: RepositoryLab) -> None:
    bench.write("m", config=CONFIG + "instance_group [{ count: 1 passive: true }, { count: 2 }]")

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        assert len(bench.alive) == 3
        assert bench.catalog.resolve("m").instances.count == 2

    run(bench, scenario)


def test_instances_know_their_cpus_and_their_backends_settings(tmp_path: Path) -> None:
    settings = LifecycleSettings(
        (tmp_path,),
        explicit=True,
        host_policies={"mine": {"cpu-cores": "0-1"}},
        backend_configs={"identity": {"a": "1"}},
    )
    bench = RepositoryLab(tmp_path, direct, settings)
    bench.write("m", config=CONFIG + 'instance_group [{ host_policy: "mine" }, { }]')

    async def scenario(bench: RepositoryLab) -> None:
        await bench.lifecycle.load("m")
        plans = [keeper.plan for keeper in bench.keepers if keeper.plan is not None]
        assert [plan.cpus for plan in plans] == [(0, 1), ()]
        assert plans[0].backend_config == {"default-max-batch-size": "4", "a": "1"}

    run(bench, scenario)


def test_a_thousand_and_more_instances_are_refused(bench: RepositoryLab) -> None:
    bench.write("m", config=CONFIG + "instance_group [{ count: 2000000000 }]")

    async def scenario(bench: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed, match="asks for 2000000000 instances"):
            await bench.lifecycle.load("m")

    run(bench, scenario)
