"""Loads are all or nothing, and a failed one never takes a serving version away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.catalog import Catalog, IndexItem, ModelState
from kernel.errors import InternalError, InvalidArgument, LoadFailed, ServingError, Unavailable
from kernel.repository.lifecycle import Lifecycle, LifecycleSettings
from kernel.testing import FakeClock, FakeInstance
from schedulers.direct import direct

if TYPE_CHECKING:
    from kernel.model import Model
    from kernel.repository.placement import InstancePlan

CONFIG = """
backend: "identity"
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]
"""


class FakeKeeper:
    """An instance that loads at once, or fails where its file `fail` says why."""

    def __init__(self, made: list[FakeKeeper]) -> None:
        self.stopped = False
        self.plan: InstancePlan | None = None
        made.append(self)

    async def start(self, title: str) -> None:
        """Nothing is started."""

    async def complete(self, config: str, model_dir: str, version: int) -> str:
        return config

    async def load(self, plan: InstancePlan, config: str) -> int:
        self.plan = plan
        reason = Path(plan.model_dir, str(plan.version), "fail")
        if reason.exists():
            raise InternalError(reason.read_text())
        return 1

    def join(self, model: Model) -> None:
        assert self.plan is not None
        model.instances.add(FakeInstance(self.plan.name))

    async def stop(self, *, at_once: bool = False) -> None:
        self.stopped = True


class Bench:
    """A lifecycle over a folder, with fake instances."""

    def __init__(self, root: Path, *, explicit: bool = True) -> None:
        self.root = root
        self.catalog = Catalog()
        self.keepers: list[FakeKeeper] = []
        self.lifecycle = Lifecycle(
            self.catalog, FakeClock(), direct, lambda: FakeKeeper(self.keepers),
            LifecycleSettings((root,), explicit=explicit),
        )  # fmt: skip

    def write(self, name: str, versions: tuple[int, ...] = (1,), config: str = CONFIG) -> None:
        for version in versions:
            (self.root / name / str(version)).mkdir(parents=True, exist_ok=True)
        (self.root / name / "config.pbtxt").write_text(config)

    def fail(self, name: str, version: int, reason: str) -> None:
        (self.root / name / str(version) / "fail").write_text(reason)

    @property
    def alive(self) -> list[str]:
        return sorted(k.plan.name for k in self.keepers if k.plan is not None and not k.stopped)


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def run(bench: Bench, scenario: Scenario) -> None:
    async def main() -> None:
        await scenario(bench)
        await bench.lifecycle.close()
        assert bench.alive == []

    asyncio.run(main())


async def settled() -> None:
    """Let background work that waits for nothing finish."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_every_model_of_the_repository_is_loaded_at_start(tmp_path: Path) -> None:
    bench = Bench(tmp_path, explicit=False)
    bench.write("a")
    bench.write("b", (1, 2))

    async def scenario(bench: Bench) -> None:
        assert await bench.lifecycle.start() == []
        assert bench.catalog.resolve("b").version == 2
        assert bench.alive == ["a_0", "b_0"]
        with pytest.raises(Unavailable, match="explicit model load / unload is not allowed"):
            await bench.lifecycle.load("a")

    run(bench, scenario)


def test_a_model_that_fails_hurts_no_other_and_says_why(bench: Bench) -> None:
    bench.write("good")
    bench.write("bad")
    bench.write("worse", config="max_batch_size: many")
    bench.fail("bad", 1, "no luck")

    async def scenario(bench: Bench) -> None:
        assert await bench.lifecycle.start(["*"]) == ["bad", "worse"]
        index = {item.name: item for item in bench.catalog.index()}
        assert index["good"].state == "READY"
        assert index["bad"] == IndexItem("bad", "1", "UNAVAILABLE", "Internal: no luck")
        assert "config.pbtxt:1:17" in index["worse"].reason
        assert bench.alive == ["good_0"]

    run(bench, scenario)


def test_a_failed_reload_leaves_the_serving_version_alone(bench: Bench) -> None:
    bench.write("m")

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        for attempt in range(3):
            bench.fail("m", 1, f"no luck {attempt}")
            with pytest.raises(LoadFailed) as caught:
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


def test_one_version_that_fails_keeps_the_others_from_being_loaded(bench: Bench) -> None:
    bench.write("m", (1, 2), CONFIG + "version_policy { all { } }")
    bench.fail("m", 2, "no luck")

    async def scenario(bench: Bench) -> None:
        with pytest.raises(LoadFailed):
            await bench.lifecycle.load("m")
        await settled()
        assert [item.state for item in bench.catalog.index()] == ["UNAVAILABLE", "UNAVAILABLE"]
        assert bench.alive == []

    run(bench, scenario)


def test_a_reload_swaps_versions_and_ends_the_old_workers(bench: Bench) -> None:
    bench.write("m")

    async def scenario(bench: Bench) -> None:
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


def test_unloading_ends_the_workers_and_is_shown(bench: Bench) -> None:
    bench.write("m")

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m")
        await bench.lifecycle.unload("m")
        await settled()
        assert bench.catalog.index() == [IndexItem("m", "1", "UNAVAILABLE", "unloaded")]
        assert bench.alive == []
        await bench.lifecycle.unload("never heard of")

    run(bench, scenario)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".", "a\0b"])
def test_names_that_are_no_folder_of_the_repository_are_refused(bench: Bench, name: str) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(InvalidArgument):
            await bench.lifecycle.load(name)

    run(bench, scenario)


def test_a_model_that_is_not_there_cannot_be_loaded(bench: Bench) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(InternalError, match="^failed to load 'm', failed to poll from model repository$"):
            await bench.lifecycle.load("m")

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
def test_what_this_server_cannot_do_is_refused_with_a_reason(bench: Bench, config: str, reason: str) -> None:
    bench.write("m", config=CONFIG + config)

    async def scenario(bench: Bench) -> None:
        with pytest.raises(LoadFailed, match=reason):
            await bench.lifecycle.load("m")
        assert bench.alive == []

    run(bench, scenario)
