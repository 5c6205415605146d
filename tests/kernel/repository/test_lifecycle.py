"""A load succeeds for all versions of a model or for none; after a failed load the old version still serves."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING

import pytest

from kernel.errors import InternalError, InvalidArgument, ModelLoadFailed, ServingError, Unavailable
from kernel.repository.settings import LifecycleSettings
from kernel.serving.catalog import IndexItem, ModelState
from schedulers.direct import direct
from tests.kernel.repository_lab import CONFIG, RepositoryLab, run, settled, until

if TYPE_CHECKING:
    from pathlib import Path


def test_every_model_of_the_repository_is_loaded_at_start(tmp_path: Path) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    lab.write("a")
    lab.write("b", (1, 2))

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start() == []
        assert lab.catalog.resolve("b").version == 2
        assert lab.alive == ["a_0", "b_0"]
        with pytest.raises(Unavailable, match="explicit model load / unload is not allowed"):
            await lab.lifecycle.load("a")

    run(lab, scenario)


def test_a_model_that_fails_to_load_is_listed_with_its_reason_and_the_others_load(lab: RepositoryLab) -> None:
    lab.write("good")
    lab.write("bad")
    lab.write("worse", config="max_batch_size: many")
    lab.fail("bad", 1, "no luck")

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start(["*"]) == ["bad", "worse"]
        index = {item.name: item for item in lab.catalog.index()}
        assert index["good"].state == "READY"
        assert index["bad"] == IndexItem("bad", "1", "UNAVAILABLE", "Internal: no luck")
        assert "config.pbtxt:1:17" in index["worse"].reason
        assert lab.alive == ["good_0"]

    run(lab, scenario)


def test_after_a_failed_reload_the_old_version_still_serves(lab: RepositoryLab) -> None:
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        serving = lab.catalog.resolve("m")
        for attempt in range(3):
            lab.fail("m", 1, f"no luck {attempt}")
            with pytest.raises(ModelLoadFailed) as caught:
                await lab.lifecycle.load("m")
            assert caught.value.message == (
                f"load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: no luck {attempt};\n"
            )
            assert lab.catalog.resolve("m") is serving
        with pytest.raises(ServingError):
            await lab.lifecycle.load("m", {"config": "{nonsense"})
        assert lab.catalog.resolve("m") is serving
        assert lab.alive == ["m_0"]

    run(lab, scenario)


def test_a_load_fails_for_all_versions_if_one_fails(lab: RepositoryLab) -> None:
    lab.write("m", (1, 2), CONFIG + "version_policy { all { } }")
    lab.fail("m", 2, "no luck")

    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed):
            await lab.lifecycle.load("m")
        await settled()
        assert [item.state for item in lab.catalog.index()] == ["UNAVAILABLE", "UNAVAILABLE"]
        assert lab.alive == []

    run(lab, scenario)


def test_a_reload_replaces_versions_and_ends_the_old_workers(lab: RepositoryLab) -> None:
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        old = lab.catalog.resolve("m")
        await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m") is old, "an unchanged model was loaded again"
        lab.write("m", (1, 2))
        await lab.lifecycle.load("m")
        await settled()
        assert lab.catalog.resolve("m").version == 2
        entry = lab.catalog.entry("m", 1)
        assert entry is not None
        assert (entry.state, entry.reason) == (ModelState.UNAVAILABLE, "unloaded")
        assert len(lab.alive) == 1

    run(lab, scenario)


def test_an_unloaded_model_has_no_workers_and_is_listed_as_unloaded(lab: RepositoryLab) -> None:
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        await lab.lifecycle.unload("m")
        await settled()
        assert lab.catalog.index() == [IndexItem("m", "1", "UNAVAILABLE", "unloaded")]
        assert lab.alive == []
        await lab.lifecycle.unload("unknown")

    run(lab, scenario)


@pytest.mark.parametrize("name", ["", " ", "..", "a..b", "a/b", ".", "a\0b"])
def test_names_that_cannot_be_a_folder_are_refused(lab: RepositoryLab, name: str) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(InvalidArgument):
            await lab.lifecycle.load(name)

    run(lab, scenario)


def test_loading_an_absent_model_fails(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(InternalError, match="^failed to load 'm', failed to poll from model repository$"):
            await lab.lifecycle.load("m")

    run(lab, scenario)


def test_a_policy_without_an_available_version_fails_the_load(lab: RepositoryLab) -> None:
    lab.write("m", config=CONFIG + "version_policy { specific { versions: 7 } }")

    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed) as caught:
            await lab.lifecycle.load("m")
        reason = "at least one version must be available under the version policy of model 'm'"
        assert caught.value.message == f"load failed for model 'm': {reason}\n"
        assert await lab.lifecycle.index() == [IndexItem("m", "", "UNAVAILABLE", f"Invalid argument: {reason}")]

    run(lab, scenario)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("parameters { key: 'TRITON_BATCH_STRATEGY_PATH' value { string_value: 'x.so' } }", "entry point of"),
    ],
)
def test_unsupported_settings_fail_the_load_with_a_reason(lab: RepositoryLab, config: str, reason: str) -> None:
    lab.write("m", config=CONFIG + config)

    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed, match=reason):
            await lab.lifecycle.load("m")
        assert lab.alive == []

    run(lab, scenario)


# ---- loads ----------------------------------------------------------------------------------


def test_a_failed_load_is_repeated_up_to_the_retry_count(tmp_path: Path) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), explicit=True, load_retry_count=2))
    lab.write("m")
    lab.fail("m", 1, "no luck")

    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed):
            await lab.lifecycle.load("m")
        assert len(lab.keepers) == 3

    run(lab, scenario)


def test_the_number_of_simultaneous_loads_is_limited(tmp_path: Path) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), load_thread_count=2))
    for name in "abc":
        lab.write(name)

    async def scenario(lab: RepositoryLab) -> None:
        lab.gate = asyncio.Event()
        start = asyncio.ensure_future(lab.lifecycle.start())
        await until(lambda: [item.state for item in lab.catalog.index()] == ["LOADING"] * 3)
        await until(lambda: len(lab.alive) == 2)
        await settled()  # enough for the third to create its keeper: from here it uses no thread
        assert len(lab.keepers) == 2
        lab.gate.set()
        assert await start == []
        assert len(lab.keepers) == 3

    run(lab, scenario)


def test_the_index_says_what_a_load_waits_for(lab: RepositoryLab) -> None:
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        lab.gate = asyncio.Event()
        load = asyncio.ensure_future(lab.lifecycle.load("m"))
        await until(lambda: bool(lab.alive))
        generation = lab.catalog.generation
        lab.keepers[0].pending("its environment is prepared")
        [item] = lab.catalog.index()
        assert (item.state, item.reason) == ("LOADING", "its environment is prepared")
        assert lab.catalog.generation == generation, "requests of other models are prepared again"
        lab.gate.set()
        await load
        lab.keepers[0].pending("nothing any more")
        [item] = lab.catalog.index()
        assert (item.state, item.reason) == ("READY", "")

    run(lab, scenario)


def test_a_load_continues_after_its_caller_is_cancelled(lab: RepositoryLab) -> None:
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        lab.gate = asyncio.Event()
        load = asyncio.ensure_future(lab.lifecycle.load("m"))
        await until(lambda: bool(lab.alive))
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        lab.gate.set()
        await until(lambda: lab.catalog.index()[0].state == "READY")

    run(lab, scenario)


def test_closing_ends_running_loads_and_their_workers(lab: RepositoryLab) -> None:
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        lab.gate = asyncio.Event()
        load = asyncio.ensure_future(lab.lifecycle.load("m"))
        await until(lambda: bool(lab.alive))
        await lab.lifecycle.close()
        assert isinstance((await asyncio.gather(load, return_exceptions=True))[0], asyncio.CancelledError)

    run(lab, scenario)


def test_a_version_whose_folder_is_removed_during_the_load_still_serves(lab: RepositoryLab) -> None:
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        lab.gate = asyncio.Event()
        load = asyncio.ensure_future(lab.lifecycle.load("m"))
        await until(lambda: bool(lab.alive))
        shutil.rmtree(lab.root / "m" / "1")
        lab.gate.set()
        await load
        with pytest.raises(ModelLoadFailed, match="at least one version must be available"):
            await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m").version == 1, "the old version no longer serves"

    run(lab, scenario)


def test_passive_instances_are_loaded_but_take_no_batches(lab: RepositoryLab) -> None:
    lab.write("m", config=CONFIG + "instance_group [{ count: 1 passive: true }, { count: 2 }]")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        assert len(lab.alive) == 3
        assert lab.catalog.resolve("m").instances.count == 2

    run(lab, scenario)


def test_plans_have_the_cpus_and_backend_settings_of_the_command_line(tmp_path: Path) -> None:
    settings = LifecycleSettings(
        (tmp_path,),
        explicit=True,
        host_policies={"mine": {"cpu-cores": "0-1"}},
        backend_configs={"identity": {"a": "1"}},
    )
    lab = RepositoryLab(tmp_path, direct, settings)
    lab.write("m", config=CONFIG + 'instance_group [{ host_policy: "mine" }, { }]')

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        plans = [keeper.plan for keeper in lab.keepers if keeper.plan is not None]
        assert [plan.cpus for plan in plans] == [(0, 1), ()]
        assert plans[0].backend_config == {"default-max-batch-size": "4", "a": "1"}

    run(lab, scenario)


def test_too_many_instances_are_refused(lab: RepositoryLab) -> None:
    lab.write("m", config=CONFIG + "instance_group [{ count: 2000000000 }]")

    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed, match="asks for 2000000000 instances"):
            await lab.lifecycle.load("m")

    run(lab, scenario)
