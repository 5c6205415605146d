"""Instances of a serving version that come and go with its load."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from kernel.repository import autoscaling, lifecycle
from kernel.serving.request import Request
from kernel.testing import FakeClock, FakeInstance, RecordingSink
from shm.tensor import Tensor
from tests.kernel.repository_lab import CONFIG, EchoInstance, RepositoryLab, run, settled, until

if TYPE_CHECKING:
    from kernel.serving.model import Model

MS, S = 10**6, 10**9


def scaled(text: str, count: int = 1) -> str:
    return (
        CONFIG
        + f"instance_group [{{ count: {count} }}]"
        + f'parameters {{ key: "naiad.autoscale" value {{ string_value: "{text}" }} }}'
    )


@pytest.fixture
def clock(lab: RepositoryLab) -> FakeClock:
    found = lab.lifecycle.clock
    assert isinstance(found, FakeClock)
    return found


@pytest.fixture
def slow_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances keep their batches until the test finishes them."""
    monkeypatch.setattr(EchoInstance, "execute", FakeInstance.execute)


def submit(model: Model, count: int) -> list[RecordingSink]:
    sinks = [RecordingSink() for _ in range(count)]
    for sink in sinks:
        model.submit(Request("m", [Tensor("IN", "FP32", [1], bytes(4))], sink))
    return sinks


def finish_all(lab: RepositoryLab) -> None:
    """Let all instances respond to what they have, until nothing is left."""
    while busy := [k.instance for k in lab.keepers if k.instance is not None and k.instance.batches]:
        for instance in busy:
            instance.respond(instance.batches.popleft())


async def pass_time(lab: RepositoryLab, clock: FakeClock, ns: int) -> None:
    """Let the fake clock go on until the driver has taken a sample after `ns`."""
    taken: list[int] = []
    look = autoscaling.Autoscaling.look

    async def noted(self: autoscaling.Autoscaling) -> None:
        await look(self)
        taken.append(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoscaling.Autoscaling, "look", noted)
        await until(lambda: len(taken) >= 1)
        clock.advance(ns)
        await until(lambda: len(taken) >= 3)
    await settled()


@pytest.mark.usefixtures("slow_instances")
def test_a_queue_that_stands_adds_instances_and_idle_ones_end(
    lab: RepositoryLab, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lab.write("m", config=scaled("max=3,up_after=100ms,down_after=100ms"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        model = lab.catalog.resolve("m")
        statistics = model.statistics
        assert (lab.alive, statistics.autoscale_instances) == (["m_0_0"], 1)
        sinks = submit(model, 9)
        await pass_time(lab, clock, 100 * MS)
        assert lab.alive == ["m_0_0", "m_0_1"]
        await pass_time(lab, clock, 100 * MS)
        assert lab.alive == ["m_0_0", "m_0_1", "m_0_2"]
        await pass_time(lab, clock, 100 * MS)
        assert model.instances.count == 3, "no more than the maximum"
        assert lab.catalog.resolve("m") is model
        finish_all(lab)
        assert [len(sink.responses) for sink in sinks] == [1] * 9
        for left in (2, 1, 1):
            await pass_time(lab, clock, 100 * MS)
            assert model.instances.count == left
        assert lab.alive == ["m_0_0"]
        assert (statistics.autoscale_instances, statistics.autoscaled_up, statistics.autoscaled_down) == (1, 2, 2)
        assert model.config.instance_group[0].count == 1, "clients see the configuration"

    run(lab, scenario)
    assert (
        "model 'm' version 1 has 2 instances instead of 1: requests have waited and no instance was idle for 0.1 s"
        in caplog.text
    )
    assert (
        "model 'm' version 1 has 1 instances instead of 2: there was always an idle instance for 0.1 s" in caplog.text
    )


@pytest.mark.usefixtures("slow_instances")
def test_an_instance_that_is_removed_finishes_its_batch(lab: RepositoryLab, clock: FakeClock) -> None:
    lab.write("m", config=scaled("max=2,up_after=100ms,down_after=100ms", 2))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        model = lab.catalog.resolve("m")
        submit(model, 1)
        second = lab.keepers[1].instance
        assert second is not None
        model.instances.set_apart(lab.keepers[0].instance)  # type: ignore[arg-type]  # it is there
        [sink] = submit(model, 1)
        assert second.batches
        model.instances.add(lab.keepers[0].instance)  # type: ignore[arg-type]  # it is there
        lab.keepers[0].instance.respond(lab.keepers[0].instance.batches.popleft())  # type: ignore[union-attr]
        await pass_time(lab, clock, 100 * MS)
        assert model.instances.count == 1
        second.respond(second.batches.popleft())
        assert len(sink.responses) == 1

    run(lab, scenario)


@pytest.mark.parametrize(("count", "first"), [(1, 2), (3, 3), (9, 4)])
def test_a_model_begins_with_its_count_within_the_bounds(lab: RepositoryLab, count: int, first: int) -> None:
    lab.write("m", config=scaled("min=2,max=4", count))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m").instances.count == first

    run(lab, scenario)


@pytest.mark.usefixtures("slow_instances")
def test_a_changed_count_in_the_configuration_leaves_the_number_to_the_load(
    lab: RepositoryLab, clock: FakeClock
) -> None:
    lab.write("m", config=scaled("max=3,up_after=100ms,down_after=100ms"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        model = lab.catalog.resolve("m")
        submit(model, 9)
        await pass_time(lab, clock, 100 * MS)
        lab.write("m", config=scaled("max=3,up_after=100ms,down_after=100ms", 3))
        await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m") is model
        assert model.instances.count == 2
        finish_all(lab)

    run(lab, scenario)


@pytest.mark.usefixtures("slow_instances")
def test_instances_that_cannot_be_started_are_tried_later(
    lab: RepositoryLab, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    lab.write("m", config=scaled("max=3,up_after=100ms,down_after=100ms"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        model = lab.catalog.resolve("m")
        submit(model, 9)
        lab.failure = "no luck"
        await pass_time(lab, clock, 100 * MS)
        assert "'m' version 1 stays at 1 instances, 1 could not be started: no luck" in caplog.text
        lab.failure = ""
        for _ in range(5):
            await pass_time(lab, clock, 100 * MS)
        assert model.instances.count == 1, "not at once"
        await pass_time(lab, clock, 10 * S)
        await pass_time(lab, clock, 100 * MS)
        assert model.instances.count > 1
        finish_all(lab)

    run(lab, scenario)


@pytest.mark.usefixtures("slow_instances")
def test_no_instance_is_started_without_memory(
    lab: RepositoryLab, clock: FakeClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "memory_byte_size", lambda: 20 << 30)
    monkeypatch.setattr(autoscaling.Autoscaling.__init__, "__defaults__", (lambda: 1 << 29,))
    lab.write("m", config=scaled("max=3,up_after=100ms,down_after=100ms"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        model = lab.catalog.resolve("m")
        submit(model, 9)
        await pass_time(lab, clock, 100 * MS)
        await pass_time(lab, clock, 100 * MS)
        assert model.instances.count == 1
        finish_all(lab)

    run(lab, scenario)
    assert caplog.text.count("gets no more instances: 512 MiB of memory are free, but 1024 MiB are needed") == 1


def test_a_version_that_was_unloaded_is_not_scaled_any_more(lab: RepositoryLab, clock: FakeClock) -> None:
    lab.write("m", config=scaled("max=3,up_after=100ms,down_after=100ms"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        await lab.lifecycle.unload("m")
        await until(lambda: not lab.lifecycle.background.count)
        assert lab.alive == []

    run(lab, scenario)


@pytest.mark.usefixtures("slow_instances")
def test_an_unload_ends_the_start_of_an_instance_that_hangs(
    lab: RepositoryLab, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "UNLOAD_WAIT_S", 0)
    lab.write("m", config=scaled("max=3,up_after=100ms,down_after=100ms"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        submit(lab.catalog.resolve("m"), 9)
        await until(lambda: lab.lifecycle.background.count == 1)
        await settled()
        lab.gate = asyncio.Event()
        while len(lab.keepers) < 2:
            clock.advance(100 * MS)
            await asyncio.sleep(0)
        await until(lambda: lab.keepers[1].plan is not None)
        await lab.lifecycle.unload("m")
        finish_all(lab)
        await until(lambda: lab.alive == [])

    run(lab, scenario)
