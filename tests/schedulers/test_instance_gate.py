"""Models under the rate limiter: schedulers get an instance only when it may execute.

Models that are loaded, changed and unloaded under the rate limiter.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import DynamicBatching, SequenceBatching
from kernel.errors import InvalidArgument, ModelLoadFailed, ServerStopping, WorkerLost
from kernel.observe.execution_reports import ExecutionTimes
from kernel.repository.settings import LifecycleSettings
from kernel.serving.batch import Batch
from kernel.serving.model import Model, SchedulerFactory
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.serving.sequence_model import SequenceModel
from kernel.testing import FakeClock, FakeInstance, RecordingSink, model_spec
from schedulers.direct import direct
from schedulers.dynamic import dynamic
from schedulers.ratelimit import RateLimiter, RateLimiting, parse_limits
from shm.tensor import Tensor
from tests.kernel.repository_lab import CONFIG, RepositoryLab, run, settled

AT_ONCE = ExecutionTimes(0, 0, 0, 0)


class Machine:
    """Several models under one limiter."""

    def __init__(self, *limits: str) -> None:
        self.clock = FakeClock()
        self.limiter = RateLimiter(parse_limits(limits))
        self.models: dict[str, Model] = {}
        self.instances: dict[str, FakeInstance] = {}
        #: Requests in the order in which they began.
        self.begun: list[str] = []

    def config(self, name: str, count: int, groups: int = 1, priority: int = 0) -> ModelConfig:
        config = ModelConfig(name=name)
        for number in range(groups):
            group = config.instance_group.add(name=f"{name}_{number}", count=1)
            group.rate_limiter.priority = priority
            if count:
                group.rate_limiter.resources.add(name="R", count=count, **{"global": True})
        return config

    def add(
        self, name: str, count: int = 1, *, groups: int = 1, priority: int = 0, concurrency: int = 1,
        schedule: SchedulerFactory = direct, delay_ns: int = 0,
    ) -> Model:  # fmt: skip
        batching = DynamicBatching(max_queue_delay_ns=delay_ns) if schedule is dynamic else None
        spec = model_spec(name, max_batch_size=4 if batching else 0, dynamic_batching=batching)
        model = Model(spec, self.config(name, count, groups, priority), 1, schedule, self.clock)
        asyncio.run(RateLimiting(self.limiter).extend(model, Path()))
        model.start()
        self.models[name] = model
        for number in range(groups):
            self.start(name, f"{name}_{number}_0", concurrency)
        return model

    def start(self, model: str, name: str, concurrency: int = 1) -> FakeInstance:
        instance = self.instances[name] = _Recording(name, concurrency, self.begun)
        self.models[model].instances.set_apart(instance)
        self.models[model].instances.add(instance)
        return instance

    def submit(self, model: str, *ids: str) -> list[Request]:
        requests = []
        for id in ids:
            request = Request(model, [Tensor("IN", "FP32", [1, 1], b"1234")], RecordingSink(), id=id)
            request.received_ns = self.clock.now_ns()
            self.models[model].submit(request)
            requests.append(request)
        self.clock.end_iteration()
        return requests

    def finish(self, name: str, times: ExecutionTimes = AT_ONCE) -> None:
        """Let an instance finish its first batch."""
        instance = self.instances[name]
        batch = instance.batches.popleft()
        for request in batch.requests:
            request.respond(Response(request.model_name, "1", request.id, outputs=[]))
        if instance.record.concurrency > 1:
            instance.record.started(batch.number)
        instance.record.executed(batch.number)
        model = next(each for each in self.models.values() if name.startswith(each.name + "_"))
        model.instances.executed(instance, batch, times)
        self.clock.end_iteration()

    def lose(self, model: str, name: str) -> None:
        instance = self.instances[name]
        for batch in instance.batches:
            for request in batch.requests:
                request.fail(WorkerLost(name, "exit code 1"))
        instance.batches.clear()
        instance.record.batches.clear()
        self.models[model].instances.lost(instance, [])

    def check(self) -> None:
        self.limiter.check()
        for model in self.models.values():
            model.check()


class _Recording(FakeInstance):
    def __init__(self, name: str, concurrency: int, begun: list[str]) -> None:
        super().__init__(name, concurrency)
        self._begun = begun

    def execute(self, batch: Batch) -> None:
        super().execute(batch)
        self._begun.extend(request.id for request in batch.requests)


def test_models_that_need_the_same_resource_execute_one_after_the_other() -> None:
    machine = Machine("R:1")
    machine.add("a")
    machine.add("b")
    machine.submit("a", "a1", "a2")
    machine.submit("b", "b1", "b2")
    assert machine.begun == ["a1"]
    for name in ("a_0_0", "b_0_0", "a_0_0", "b_0_0"):
        machine.finish(name)
        machine.check()
    assert machine.begun == ["a1", "b1", "a2", "b2"]


def test_nothing_is_dispatched_ahead_of_time() -> None:
    machine = Machine()
    machine.add("a", 0)
    for _ in range(20):
        machine.submit("a", "x")
        machine.finish("a_0_0")
    machine.submit("a", "1", "2")
    assert len(machine.instances["a_0_0"].batches) == 1, "without the limiter this fast model would get both"
    machine.finish("a_0_0")
    machine.finish("a_0_0")


def test_instances_of_one_model_take_turns() -> None:
    machine = Machine("R:1")
    machine.add("a", groups=2)
    machine.submit("a", "1", "2", "3", "4")
    for name in ("a_0_0", "a_1_0", "a_0_0", "a_1_0"):
        machine.finish(name)
    assert machine.begun == ["1", "2", "3", "4"]


def test_priorities_count_across_models() -> None:
    machine = Machine("R:1")
    machine.add("often", priority=1)
    machine.add("seldom", priority=3)
    machine.submit("often", *["o"] * 30)
    machine.submit("seldom", *["s"] * 30)
    for _ in range(19):
        machine.finish(next(name for name, each in machine.instances.items() if each.batches))
    assert (machine.begun.count("o"), machine.begun.count("s")) == (15, 5)


def test_the_dynamic_batcher_collects_requests_while_its_instance_waits() -> None:
    machine = Machine("R:1")
    machine.add("a")
    machine.add("b", schedule=dynamic)
    machine.submit("a", "a1")
    machine.submit("b", "b1", "b2", "b3")
    machine.finish("a_0_0")
    assert len(machine.instances["b_0_0"].batches[0].requests) == 3
    machine.finish("b_0_0")


def test_a_batcher_that_delays_keeps_no_resource() -> None:
    machine = Machine("R:1")
    machine.add("a")
    machine.add("b", schedule=dynamic, delay_ns=1_000_000)
    machine.submit("b", "b1")
    machine.submit("a", "a1", "a2")
    assert machine.begun == ["a1"]
    machine.finish("a_0_0")
    machine.finish("a_0_0")
    machine.clock.advance(2_000_000)
    assert machine.begun == ["a1", "a2", "b1"]
    machine.finish("b_0_0")


def test_an_instance_with_concurrency_takes_resources_for_each_batch() -> None:
    machine = Machine("R:3")
    machine.add("a", concurrency=8)
    machine.submit("a", *"12345")
    assert machine.begun == ["1", "2", "3"]
    machine.finish("a_0_0")
    assert machine.begun == ["1", "2", "3", "4"]
    for _ in range(4):
        machine.finish("a_0_0")
    machine.check()


def test_a_lost_worker_gives_its_resources_back_and_the_next_one_goes_on_counting() -> None:
    machine = Machine("R:1")
    machine.add("a")
    machine.add("b")
    machine.submit("a", "a1", "a2")
    machine.submit("b", "b1", "b2", "b3")
    machine.lose("a", "a_0_0")
    assert machine.begun == ["a1", "b1"]
    machine.start("a", "a_0_0")
    for _ in range(3):
        machine.finish(next(name for name, each in machine.instances.items() if each.batches))
    assert machine.begun[-3:] == ["a2", "b2", "b3"]
    machine.finish("b_0_0")
    machine.check()


def test_an_instance_that_is_set_apart_finishes_and_then_gives_back() -> None:
    machine = Machine("R:1")
    model = machine.add("a")
    machine.add("b")
    machine.submit("a", "a1", "a2")
    machine.submit("b", "b1")
    model.instances.set_apart(machine.instances["a_0_0"])
    assert machine.begun == ["a1"]
    machine.finish("a_0_0")
    assert machine.begun == ["a1", "b1"]
    machine.finish("b_0_0")
    model.instances.add(machine.instances["a_0_0"])
    assert machine.begun == ["a1", "b1", "a2"]
    machine.finish("a_0_0")


def test_a_scheduler_that_asks_for_one_instance_gets_it_when_it_may_execute() -> None:
    machine = Machine("R:1")
    machine.add("a")
    spec = model_spec("b", sequence_batching=SequenceBatching())
    model = SequenceModel(spec, machine.config("b", 1), 1, direct, machine.clock)
    instances = model.instances
    asyncio.run(RateLimiting(machine.limiter).extend(model, Path()))
    machine.models["b"] = model
    instance = machine.start("b", "b_0_0")
    machine.submit("a", "a1")
    assert not instances.has_room(instance, 2)
    machine.finish("a_0_0")
    assert instances.has_room(instance, 2)
    instances.dispatch(instance, Batch([]))
    assert not instances.has_room(instance, 2), "nothing is dispatched ahead of time"
    machine.check()


def test_nothing_is_dispatched_ahead_of_time_however_long_the_model_takes() -> None:
    for took_ns in (1_000, 1_000_000, 1_000_000_000):
        machine = Machine()
        model = machine.add("a")
        for _ in range(40):
            machine.submit("a", "slow")
            begun_ns = machine.clock.now_ns()
            machine.clock.time_ns += took_ns
            machine.finish("a_0_0", ExecutionTimes(begun_ns, begun_ns, begun_ns + took_ns, begun_ns + took_ns))
        machine.submit("a", "last")
        machine.clock.time_ns += took_ns - 1
        instances = model.instances
        assert instances.open_instance() is instances.soon_idle_instance() is instances.idle_instance() is None
        assert instances.next_batch_ns() is None


def test_a_warm_up_needs_no_resources() -> None:
    machine = Machine("R:1")
    machine.add("a")
    model = machine.add("b")
    machine.submit("a", "a1")
    new = _Recording("b_0_1", 1, machine.begun)
    machine.instances["b_0_1"] = new
    model.instances.set_apart(new)
    warm_up = Request("b", [], RecordingSink(), id="warm")
    model.instances.dispatch_apart(new, Batch([warm_up]))
    assert machine.begun == ["a1", "warm"]
    machine.finish("b_0_1")
    machine.submit("b", "b1")
    assert machine.begun == ["a1", "warm"]
    machine.finish("a_0_0")
    machine.finish("b_0_0")


def test_a_model_that_could_never_execute_is_refused_and_others_are_not_affected() -> None:
    machine = Machine("R:2")
    machine.add("a", 2)
    with pytest.raises(InvalidArgument, match='Resource count for "R" is limited to 2'):
        machine.add("b", 3)
    machine.submit("a", "a1")
    assert machine.begun == ["a1"]
    machine.finish("a_0_0")


def test_a_model_that_is_closed_counts_no_longer() -> None:
    machine = Machine()
    machine.add("a", 1)
    large = machine.add("large", 4)
    for name in "bcd":
        machine.add(name, 1)
    for name in "abcd":
        machine.submit(name, name)
    assert machine.begun == ["a", "b", "c", "d"]
    for name in "abcd":
        machine.finish(f"{name}_0_0")
    large.instances.forget(machine.instances["large_0_0"])
    large.close(ServerStopping(""))
    for name in "abcd":
        machine.submit(name, name)
    assert machine.begun[4:] == ["a"]
    for name in "abcd":
        machine.finish(f"{name}_0_0")


def test_new_instances_of_a_serving_model_bring_their_own_needs() -> None:
    machine = Machine("R:3")
    model = machine.add("a", 3)
    with pytest.raises(InvalidArgument):
        model.on_change(machine.config("a", 4))
    machine.submit("a", "1", "2")
    changed = machine.config("a", 1, groups=3)
    del changed.instance_group[0]
    model.on_change(changed)
    model.config = changed
    for number in (1, 2):
        machine.start("a", f"a_{number}_0")
    assert machine.begun == ["1"], "the former instance has all three"
    model.instances.set_apart(machine.instances["a_0_0"])
    machine.finish("a_0_0")
    model.instances.forget(machine.instances["a_0_0"])
    machine.submit("a", "3")
    assert machine.begun == ["1", "2", "3"]
    machine.check()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_happens_every_request_is_executed(data: st.DataObject) -> None:
    machine = Machine("R:3")
    names = "abc"[: data.draw(st.integers(1, 3))]
    for name in names:
        machine.add(
            name, data.draw(st.integers(0, 3)), groups=data.draw(st.integers(1, 3)),
            priority=data.draw(st.integers(0, 2)), concurrency=data.draw(st.integers(1, 2)),
            schedule=data.draw(st.sampled_from([direct, dynamic])),
        )  # fmt: skip
    submitted = 0

    def busy() -> list[str]:
        return [name for name, each in machine.instances.items() if each.batches]

    for _ in range(data.draw(st.integers(1, 40))):
        running = busy()
        finishes: bool = data.draw(st.booleans())
        if running and finishes:
            machine.finish(data.draw(st.sampled_from(running)))
        else:
            machine.submit(data.draw(st.sampled_from(names)), str(submitted))
            submitted += 1
        machine.check()
    while busy():
        machine.finish(busy()[0])
        machine.check()
    assert len(machine.begun) == submitted, "requests wait although nothing executes"


def needs(count: int, instances: int = 1) -> str:
    limiter = f'rate_limiter {{ resources [{{ name: "R" global: true count: {count} }}] }}'
    return CONFIG + f"instance_group [{{ count: {instances} {limiter} }}]"


@pytest.fixture
def limiter() -> RateLimiter:
    return RateLimiter(parse_limits(["R:2"]))


@pytest.fixture
def lab(tmp_path: Path, limiter: RateLimiter) -> RepositoryLab:
    settings = LifecycleSettings((tmp_path,), explicit=True, extensions=(RateLimiting(limiter),), has_limiter=True)
    return RepositoryLab(tmp_path, direct, settings)


def test_a_model_that_needs_too_much_is_not_loaded_and_leaves_nothing(lab: RepositoryLab, limiter: RateLimiter) -> None:
    lab.write("m", config=needs(3))

    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(ModelLoadFailed):
            await lab.lifecycle.load("m")
        [item] = lab.catalog.index()
        assert item.reason == (
            'Invalid argument: Resource count for "R" is limited to 2 which will prevent scheduling of one or more '
            "model instances, the minimum required count is 3"
        )
        assert limiter.needs == {}

    run(lab, scenario)


def test_a_change_that_needs_too_much_is_refused_and_the_model_serves_on(
    lab: RepositoryLab, limiter: RateLimiter
) -> None:
    lab.write("m", config=needs(1))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        serving = lab.catalog.resolve("m")
        lab.write("m", config=needs(3))
        with pytest.raises(ModelLoadFailed):
            await lab.lifecycle.load("m")
        assert lab.alive == ["m_0_0"]
        lab.write("m", config=needs(2, instances=2))
        await lab.lifecycle.load("m")
        await settled()
        assert lab.catalog.resolve("m") is serving
        assert len(serving.instances.serving) == 2
        [registered] = limiter.needs.values()
        assert max(count for each in registered for count in each.counts.values()) == 2
        await lab.lifecycle.unload("m")
        await settled()
        assert limiter.needs == {}

    run(lab, scenario)
