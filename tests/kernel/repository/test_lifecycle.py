"""Loads are all or nothing, and a failed one never takes a serving version away."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.catalog import Catalog, IndexItem, ModelState
from kernel.errors import InternalError, InvalidArgument, LoadFailed, ServingError, Unavailable
from kernel.observe.statistics import ExecutionTimes
from kernel.repository.lifecycle import Lifecycle
from kernel.repository.settings import LifecycleSettings
from kernel.response import Response
from kernel.testing import FakeClock, FakeInstance
from schedulers.direct import direct

if TYPE_CHECKING:
    from kernel.batch import Batch
    from kernel.model import Model
    from kernel.repository.placement import InstancePlan

CONFIG = """
backend: "identity"
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]
"""


class EchoInstance(FakeInstance):
    """An instance that answers each batch soon, with an error where its model's file `refuse` says so."""

    def __init__(self, name: str, model: Model, refusal: str) -> None:
        super().__init__(name)
        self._model = model
        self._refusal = refusal
        self.executed: list[list[bytes]] = []

    def execute(self, batch: Batch) -> None:
        self.executed.append([bytes(request.inputs[0].data or b"") for request in batch.requests])
        asyncio.get_running_loop().call_soon(self._answer, batch)

    def _answer(self, batch: Batch) -> None:
        for request in batch.requests:
            if self._refusal:
                request.fail(InternalError(self._refusal))
            else:
                request.respond(Response(request.model_name, "1", request.id, outputs=[]))
        self._model.instances.executed(self, ExecutionTimes(0, 0, 0))


class FakeKeeper:
    """An instance that loads at once, or fails where its file `fail` says why."""

    def __init__(self, made: list[FakeKeeper]) -> None:
        self.stopped = False
        self.plan: InstancePlan | None = None
        self.instance: EchoInstance | None = None
        self.config = ""
        #: What a load waits for, if anything, why it fails, and what the instance answers requests with.
        self.gate: asyncio.Event | None = None
        self.failure = ""
        self.refusal = ""
        #: Set when the instance has finished what it has; None if it never has anything.
        self.finished: asyncio.Event | None = None
        made.append(self)

    async def start(self, title: str) -> None:
        """Nothing is started."""

    async def complete(self, config: str, model_dir: str, version: int, backend_config: dict[str, str]) -> str:
        return config

    async def load(self, plan: InstancePlan, config: str) -> int:
        self.plan = plan
        self.config = config
        reason = Path(plan.model_dir, str(plan.version), "fail")
        if self.failure or reason.exists():
            raise InternalError(self.failure or reason.read_text())
        if self.gate is not None:
            await self.gate.wait()
        return 1

    def join(self, model: Model) -> EchoInstance:
        assert self.plan is not None
        refusal = Path(self.plan.model_dir, "refuse")
        self.refusal = self.refusal or (refusal.read_text() if refusal.exists() else "")
        self.model = model
        self.instance = EchoInstance(self.plan.name, model, self.refusal)
        model.instances.set_apart(self.instance)
        return self.instance

    def serve(self) -> None:
        assert self.instance is not None
        self.model.instances.add(self.instance)

    def use(self, config: str) -> None:
        self.config = config

    async def leave(self) -> None:
        if self.instance is not None:
            self.model.instances.set_apart(self.instance)
        if self.finished is not None:
            await self.finished.wait()

    async def stop(self, *, at_once: bool = False) -> None:
        self.stopped = True


class Bench:
    """A lifecycle over a folder, with fake instances."""

    def __init__(self, root: Path, settings: LifecycleSettings | None = None) -> None:
        self.root = root
        self.settings = settings or LifecycleSettings((root,), explicit=True)
        self.catalog = Catalog(namespacing=self.settings.namespacing)
        self.keepers: list[FakeKeeper] = []
        self.gate: asyncio.Event | None = None
        self.failure = self.refusal = ""
        self.lifecycle = Lifecycle(self.catalog, FakeClock(), direct, self._new_keeper, self.settings)

    def _new_keeper(self) -> FakeKeeper:
        keeper = FakeKeeper(self.keepers)
        keeper.gate, keeper.failure, keeper.refusal = self.gate, self.failure, self.refusal
        return keeper

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


async def until(condition: Callable[[], bool]) -> None:
    """Let everything go on, threads as well, until `condition` holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for is the work of the code under test, not an event
        await asyncio.sleep(0)


def test_every_model_of_the_repository_is_loaded_at_start(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LifecycleSettings((tmp_path,)))
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


@pytest.mark.parametrize("name", ["", " ", "..", "a..b", "a/b", ".", "a\0b"])
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


def test_a_policy_that_leaves_no_version_has_a_text_of_its_own(bench: Bench) -> None:
    bench.write("m", config=CONFIG + "version_policy { specific { versions: 7 } }")

    async def scenario(bench: Bench) -> None:
        with pytest.raises(LoadFailed) as caught:
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
def test_what_this_server_cannot_do_is_refused_with_a_reason(bench: Bench, config: str, reason: str) -> None:
    bench.write("m", config=CONFIG + config)

    async def scenario(bench: Bench) -> None:
        with pytest.raises(LoadFailed, match=reason):
            await bench.lifecycle.load("m")
        assert bench.alive == []

    run(bench, scenario)


# ---- several repositories -------------------------------------------------------------------


def two_repositories(root: Path, **settings: Any) -> tuple[Bench, Bench]:
    """Return a bench over two repositories that both have model `m`, and one that only writes to the second."""
    first, second = root / "first", root / "second"
    for folder in (first, second):
        folder.mkdir()
    bench = Bench(first, LifecycleSettings((first, second), **settings))
    bench.write("m")
    other = Bench(second)
    other.write("m")
    other.write("n")
    return bench, other


def test_a_name_in_two_repositories_is_loaded_from_neither(tmp_path: Path) -> None:
    bench, _ = two_repositories(tmp_path)

    async def scenario(bench: Bench) -> None:
        assert await bench.lifecycle.start() == ["m"]
        assert await bench.lifecycle.index(ready=True) == [
            IndexItem("m", "", "UNAVAILABLE", "model appears in two or more repositories"),
            IndexItem("n", "1", "READY"),
        ]

    run(bench, scenario)


def test_what_is_there_twice_concerns_only_those_who_ask_for_it(tmp_path: Path) -> None:
    bench, _ = two_repositories(tmp_path, explicit=True)

    async def scenario(bench: Bench) -> None:
        assert await bench.lifecycle.start(["n"]) == []
        with pytest.raises(InternalError, match="^failed to load 'm', failed to poll from model repository$"):
            await bench.lifecycle.load("m")

    run(bench, scenario)


def test_with_namespacing_both_are_loaded_and_one_must_go_before_the_name_answers(tmp_path: Path) -> None:
    bench, other = two_repositories(tmp_path, explicit=True, namespacing=True)

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m")
        assert [(item.name, item.state) for item in await bench.lifecycle.index()] == [
            ("m", "READY"), ("m", "READY"), ("n", ""),
        ]  # fmt: skip
        with pytest.raises(InvalidArgument, match="^There are 2 identifiers of model 'm' in global map"):
            bench.catalog.resolve("m")
        other.fail("m", 1, "no luck")
        (tmp_path / "first" / "m" / "1" / "new").touch()
        with pytest.raises(LoadFailed) as caught:
            await bench.lifecycle.load("m")
        assert caught.value.message == (
            f"load failed for model '{tmp_path}/second::m': version 1 is at UNAVAILABLE state: Internal: no luck;\n"
        )
        await bench.lifecycle.unload("m")
        await settled()
        assert bench.alive == []
        await bench.lifecycle.load("n")
        assert bench.catalog.resolve("n").spec.namespace == str(tmp_path / "second")

    run(bench, scenario)


def test_the_index_shows_what_came_and_went_since_the_last_load(bench: Bench) -> None:
    async def scenario(bench: Bench) -> None:
        bench.write("new")
        assert await bench.lifecycle.index() == [IndexItem("new")]
        shutil.rmtree(bench.root / "new")
        assert await bench.lifecycle.index() == []

    run(bench, scenario)


# ---- poll mode ------------------------------------------------------------------------------


def test_polling_loads_what_is_new_or_changed_and_unloads_what_is_gone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LifecycleSettings((tmp_path,)))
    bench.write("kept")
    bench.write("gone")

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.start()
        kept, keepers = bench.catalog.resolve("kept"), len(bench.keepers)
        await bench.lifecycle.poll()
        assert len(bench.keepers) == keepers, "nothing had changed"
        shutil.rmtree(tmp_path / "gone")
        bench.write("new")
        bench.write("kept", (1, 2))
        await bench.lifecycle.poll()
        await settled()
        assert bench.catalog.resolve("kept").version == 2
        assert bench.catalog.resolve("kept") is not kept
        assert [(item.name, item.state) for item in bench.catalog.index()] == [
            ("gone", "UNAVAILABLE"), ("kept", "UNAVAILABLE"), ("kept", "READY"), ("new", "READY"),
        ]  # fmt: skip
        with pytest.raises(Unavailable):
            await bench.lifecycle.load("new")

    run(bench, scenario)


def test_polling_takes_no_serving_version_away_for_a_broken_configuration(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LifecycleSettings((tmp_path,)))
    bench.write("m")

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.start()
        serving = bench.catalog.resolve("m")
        bench.write("m", config="max_batch_size: many")
        await bench.lifecycle.poll()
        assert bench.catalog.resolve("m") is serving
        bench.write("m", config=CONFIG + "max_batch_size: 2")
        await bench.lifecycle.poll()
        assert bench.catalog.resolve("m").spec.max_batch_size == 2

    run(bench, scenario)


# ---- loads ----------------------------------------------------------------------------------


def test_a_load_that_fails_is_tried_again_as_often_as_the_command_line_says(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LifecycleSettings((tmp_path,), explicit=True, load_retry_count=2))
    bench.write("m")
    bench.fail("m", 1, "no luck")

    async def scenario(bench: Bench) -> None:
        with pytest.raises(LoadFailed):
            await bench.lifecycle.load("m")
        assert len(bench.keepers) == 3

    run(bench, scenario)


def test_no_more_versions_load_at_once_than_the_command_line_says(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LifecycleSettings((tmp_path,), load_thread_count=2))
    for name in "abc":
        bench.write(name)

    async def scenario(bench: Bench) -> None:
        bench.gate = asyncio.Event()
        start = asyncio.ensure_future(bench.lifecycle.start())
        await until(lambda: len(bench.alive) == 2)
        await settled()
        assert len(bench.keepers) == 2
        assert {item.state for item in bench.catalog.index()} == {"LOADING"}
        bench.gate.set()
        assert await start == []
        assert len(bench.keepers) == 3

    run(bench, scenario)


def test_a_client_that_gives_up_does_not_end_its_load(bench: Bench) -> None:
    bench.write("m")

    async def scenario(bench: Bench) -> None:
        bench.gate = asyncio.Event()
        load = asyncio.ensure_future(bench.lifecycle.load("m"))
        await until(lambda: bool(bench.alive))
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        bench.gate.set()
        await until(lambda: bench.catalog.index()[0].state == "READY")

    run(bench, scenario)


def test_a_server_that_closes_ends_loads_and_leaves_no_worker(bench: Bench) -> None:
    bench.write("m")

    async def scenario(bench: Bench) -> None:
        bench.gate = asyncio.Event()
        load = asyncio.ensure_future(bench.lifecycle.load("m"))
        await until(lambda: bool(bench.alive))
        await bench.lifecycle.close()
        assert isinstance((await asyncio.gather(load, return_exceptions=True))[0], asyncio.CancelledError)

    run(bench, scenario)


def test_a_version_that_is_removed_while_it_loads_goes_on_as_far_as_its_backend_can(bench: Bench) -> None:
    bench.write("m")

    async def scenario(bench: Bench) -> None:
        bench.gate = asyncio.Event()
        load = asyncio.ensure_future(bench.lifecycle.load("m"))
        await until(lambda: bool(bench.alive))
        shutil.rmtree(bench.root / "m" / "1")
        bench.gate.set()
        await load
        with pytest.raises(LoadFailed, match="at least one version must be available"):
            await bench.lifecycle.load("m")
        assert bench.catalog.resolve("m").version == 1, "what serves goes on"

    run(bench, scenario)


def test_passive_instances_are_loaded_and_never_asked(bench: Bench) -> None:
    bench.write("m", config=CONFIG + "instance_group [{ count: 1 passive: true }, { count: 2 }]")

    async def scenario(bench: Bench) -> None:
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
    bench = Bench(tmp_path, settings)
    bench.write("m", config=CONFIG + 'instance_group [{ host_policy: "mine" }, { }]')

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m")
        plans = [keeper.plan for keeper in bench.keepers if keeper.plan is not None]
        assert [plan.cpus for plan in plans] == [(0, 1), ()]
        assert plans[0].backend_config == {"default-max-batch-size": "4", "a": "1"}

    run(bench, scenario)


def test_a_thousand_and_more_instances_are_refused(bench: Bench) -> None:
    bench.write("m", config=CONFIG + "instance_group [{ count: 2000000000 }]")

    async def scenario(bench: Bench) -> None:
        with pytest.raises(LoadFailed, match="asks for 2000000000 instances"):
            await bench.lifecycle.load("m")

    run(bench, scenario)


# ---- changes of the instances alone ---------------------------------------------------------


def group(count: int, more: str = "") -> str:
    return CONFIG + f"instance_group [{{ count: {count} {more} }}]"


def test_instances_come_and_go_while_the_version_serves(bench: Bench) -> None:
    bench.write("m", config=group(1))

    async def scenario(bench: Bench) -> None:
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


def test_an_instance_that_goes_finishes_first_and_nobody_waits_for_it(bench: Bench) -> None:
    bench.write("m", config=group(2))

    async def scenario(bench: Bench) -> None:
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


def test_an_instance_that_cannot_be_added_leaves_those_that_serve(bench: Bench) -> None:
    bench.write("m", config=group(2))

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        bench.write("m", config=group(4))
        bench.failure = "no luck"
        for _ in range(2):
            with pytest.raises(LoadFailed) as caught:
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


def test_only_new_instances_are_warmed_up_and_before_they_take_requests(bench: Bench) -> None:
    warm = WARM % "zero_data: true"
    bench.write("m", config=group(1) + warm)

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        bench.write("m", config=group(2) + warm)
        bench.refusal = "boom"
        with pytest.raises(LoadFailed, match="READY state: Invalid argument: failed to run warmup sample 'w': boom; ;"):
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
def test_what_the_version_was_loaded_from_decides_whether_it_is_loaded_again(bench: Bench, changed: str) -> None:
    policy = "version_policy { specific { versions: 1 } }"
    bench.write("m", (1, 2), group(1) + policy)

    async def scenario(bench: Bench) -> None:
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


def test_a_version_that_stays_is_not_loaded_again_for_one_that_comes(bench: Bench) -> None:
    bench.write("m", (1, 2), CONFIG)

    async def scenario(bench: Bench) -> None:
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


def test_a_configuration_of_a_load_request_changes_instances_until_the_next_load(bench: Bench) -> None:
    tensor = {"data_type": "TYPE_FP32", "dims": [1]}
    config = {
        "backend": "identity",
        "input": [{"name": "IN", **tensor}],
        "output": [{"name": "OUT", **tensor}],
        "instance_group": [{"count": 3}],
    }
    bench.write("m")

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        await bench.lifecycle.load("m", {"config": json.dumps(config)})
        assert serving.instances.count == 3
        await bench.lifecycle.load("m")
        await settled()
        assert serving.instances.count == 1
        assert bench.catalog.resolve("m") is serving

    run(bench, scenario)


# ---- overrides ------------------------------------------------------------------------------


def test_files_of_a_load_request_stand_in_for_the_folder_until_they_are_replaced(bench: Bench) -> None:
    bench.write("m", (1, 2))
    config = json.dumps({"backend": "identity", "max_batch_size": 3})

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m", {"config": config, "file:7/model.txt": b"x"})
        assert bench.catalog.resolve("m").version == 7
        plan = bench.keepers[-1].plan
        assert plan is not None
        folder = Path(plan.model_dir)
        assert (folder / "7" / "model.txt").read_bytes() == b"x"
        await bench.lifecycle.load("m")
        await until(lambda: not folder.exists())
        assert bench.catalog.resolve("m").version == 2

    run(bench, scenario)


def test_a_model_that_no_repository_has_can_be_sent(bench: Bench) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("sent", {"config": '{"backend": "identity"}', "file:1/a": b""})
        assert bench.catalog.resolve("sent").version == 1

    run(bench, scenario)


@pytest.mark.parametrize(
    "parameters",
    [
        {"file:1/a": b""},
        {"config": "{}", "file:../a": b""},
        {"config": "{nonsense", "file:1/a": b""},
        {"config": '{"backend": "identity", "name": "other"}', "file:1/a": b""},
        {"config": '{"backend": "no_such", "platform": "ensemble"}', "file:1/a": b""},
    ],
)
def test_overrides_that_cannot_be_used_change_nothing(bench: Bench, parameters: dict[str, Any]) -> None:
    bench.write("m")

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        with pytest.raises(InternalError, match="^failed to load 'm', failed to poll from model repository$"):
            await bench.lifecycle.load("m", parameters)
        assert bench.catalog.resolve("m") is serving
        assert [item.state for item in await bench.lifecycle.index()] == ["READY"]

    run(bench, scenario)


# ---- warm-up --------------------------------------------------------------------------------

WARMUP = """
instance_group [{ count: 2 }]
model_warmup [
    { name: "a" batch_size: 2 count: 2 inputs { key: "IN" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } },
    { name: "b" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: 1 input_data_file: "raw" } } }
]
"""


def test_every_instance_runs_every_sample_before_the_version_is_ready(bench: Bench) -> None:
    bench.write("m", config=CONFIG + WARMUP)
    (bench.root / "m" / "warmup").mkdir()
    (bench.root / "m" / "warmup" / "raw").write_bytes(b"\0\0\x80?")

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m")
        zero, one = bytes(4), b"\0\0\x80?"
        for keeper in bench.keepers:
            assert keeper.instance is not None
            assert keeper.instance.executed == [[zero, zero], [zero, zero], [one]]
        statistics = bench.catalog.resolve("m").statistics
        assert (statistics.inference_count, statistics.execution_count, statistics.pending) == (10, 6, 0)

    run(bench, scenario)


def test_a_failing_warm_up_fails_the_load_and_takes_no_serving_version_away(bench: Bench) -> None:
    bench.write("m")

    async def scenario(bench: Bench) -> None:
        await bench.lifecycle.load("m")
        serving = bench.catalog.resolve("m")
        bench.write("m", config=CONFIG + WARMUP.replace("input_data_file", "zero_data").replace('"raw"', "true"))
        (bench.root / "m" / "refuse").write_text("boom")
        with pytest.raises(LoadFailed) as caught:
            await bench.lifecycle.load("m")
        assert caught.value.message == (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: failed to run warmup "
            "sample 'a': boom; boom; boom; boom; ;\n"
        )
        assert bench.catalog.resolve("m") is serving
        assert len(bench.alive) == 1

    run(bench, scenario)
