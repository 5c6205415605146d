"""Loads that hang: an unload and the end of the server end them, and the log names those that take long."""

from __future__ import annotations

import asyncio

import pytest

from kernel.errors import ModelLoadFailed, ServingError
from kernel.repository import lifecycle, running_loads
from kernel.repository.running_loads import LoadEnded, LoadReports, LongLoads, RunningLoads
from kernel.testing import FakeClock
from tests.kernel.repository_lab import RepositoryLab, run, settled, until


@pytest.fixture(autouse=True)
def _ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "UNLOAD_WAIT_S", 0)


SECOND_NS = 1_000_000_000


async def begun(lab: RepositoryLab, name: str) -> asyncio.Task[None]:
    """Return the load of `name`, which hangs in its instance."""
    loading = asyncio.ensure_future(lab.lifecycle.load(name))
    before = len(lab.keepers)
    await until(lambda: len(lab.keepers) > before and lab.keepers[-1].plan is not None)
    return loading


async def error_of(load: asyncio.Task[None]) -> ServingError:
    with pytest.raises(ServingError) as raised:
        await load
    return raised.value


def test_an_unload_ends_a_load_that_hangs(lab: RepositoryLab) -> None:
    lab.write("m")
    lab.gate = asyncio.Event()

    async def scenario(lab: RepositoryLab) -> None:
        loading = await begun(lab, "m")
        await lab.lifecycle.unload("m")
        error = await error_of(loading)
        assert isinstance(error, ModelLoadFailed)
        assert "the load was ended, because the model was unloaded meanwhile" in error.message
        assert lab.alive == []
        assert [item.state for item in await lab.lifecycle.index()] == ["UNAVAILABLE"]

    run(lab, scenario)


def test_an_unload_waits_for_a_load_that_ends_in_time(lab: RepositoryLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "UNLOAD_WAIT_S", 600)
    lab.write("m")
    lab.gate = asyncio.Event()

    async def scenario(lab: RepositoryLab) -> None:
        loading = await begun(lab, "m")
        unloading = asyncio.ensure_future(lab.lifecycle.unload("m"))
        await settled()
        assert lab.gate is not None
        lab.gate.set()
        await loading
        await unloading
        await until(lambda: lab.alive == [])

    run(lab, scenario)


def test_loads_that_wait_for_one_that_an_unload_ends_fail_too(
    lab: RepositoryLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.write("m")
    lab.gate = asyncio.Event()
    asked: list[str] = []
    mark = RunningLoads.mark

    def recorded(self: RunningLoads, identifier: str) -> int:
        asked.append(identifier)
        return mark(self, identifier)

    monkeypatch.setattr(RunningLoads, "mark", recorded)

    async def scenario(lab: RepositoryLab) -> None:
        loads = [await begun(lab, "m"), asyncio.ensure_future(lab.lifecycle.load("m"))]
        await until(lambda: asked == ["m", "m"])
        await lab.lifecycle.unload("m")
        assert [type(await error_of(each)) for each in loads] == [ModelLoadFailed, LoadEnded]
        lab.gate = None
        await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m").version == 1

    run(lab, scenario)


def test_an_unload_during_a_reload_ends_both_versions(lab: RepositoryLab) -> None:
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        lab.write("m", (2,))
        lab.gate = asyncio.Event()
        loading = await begun(lab, "m")
        await lab.lifecycle.unload("m")
        await error_of(loading)
        await until(lambda: lab.alive == [])
        assert {item.state for item in await lab.lifecycle.index()} == {"UNAVAILABLE"}

    run(lab, scenario)


def test_an_unload_of_a_model_leaves_the_loads_of_others_alone(lab: RepositoryLab) -> None:
    lab.write("m")
    lab.write("other")
    lab.gate = asyncio.Event()

    async def scenario(lab: RepositoryLab) -> None:
        loading, other = await begun(lab, "m"), await begun(lab, "other")
        await lab.lifecycle.unload("m")
        await error_of(loading)
        assert lab.gate is not None
        lab.gate.set()
        await other
        assert lab.catalog.resolve("other").version == 1

    run(lab, scenario)


def test_the_end_of_the_server_ends_loads_that_hang_that_wait_and_that_come(lab: RepositoryLab) -> None:
    for name in ("m", "other"):
        lab.write(name)
    lab.gate = asyncio.Event()

    async def scenario(lab: RepositoryLab) -> None:
        loads = [await begun(lab, "m"), await begun(lab, "other")]
        loads.append(asyncio.ensure_future(lab.lifecycle.load("m")))
        await settled()
        lab.lifecycle.running_loads.end_all()
        loads.append(asyncio.ensure_future(lab.lifecycle.load("other")))
        for load in loads:
            assert "the load was ended, because the server stops" in (await error_of(load)).message
        assert lab.alive == []

    run(lab, scenario)


def test_a_load_that_was_begun_before_the_end_of_the_server_goes_no_further() -> None:
    done: list[str] = []

    async def part() -> None:
        done.append("a part")

    async def scenario() -> None:
        loads = RunningLoads()
        loads.end_all()
        with pytest.raises(LoadEnded, match="the server stops"):
            await loads.run_one("m", part())

    asyncio.run(scenario())
    assert done == []


def test_a_long_load_is_reported_at_growing_intervals() -> None:
    loads = LongLoads(4, 1800, explicit=True)
    loads.turn(loads.begin("m", 1, 0))
    assert loads.due(59 * SECOND_NS) == []
    assert loads.due(60 * SECOND_NS) == [
        "model 'm' version 1 has been loading for 60 s; an unload request ends it, each of its steps may take 1800 s "
        "(--model-load-timeout-secs)"
    ]
    reported = [second for second in range(61, 1000, 5) if loads.due(second * SECOND_NS)]
    assert reported == [121, 241, 481, 961]


def test_a_load_that_waits_for_its_turn_names_those_that_have_it() -> None:
    loads = LongLoads(4, 0, explicit=False)
    numbers = [loads.begin(name, 1, 0) for name in "abcd"]
    for number in numbers:
        loads.turn(number)
    loads.begin("m", 2, 30 * SECOND_NS)
    assert loads.due(95 * SECOND_NS)[-1] == (
        "model 'm' version 2 has waited for 65 s until other models are loaded: 'a', 'b', 'c' and 1 more "
        "(--model-load-thread-count=4)"
    )
    assert loads.due(130 * SECOND_NS)[0] == "model 'a' version 1 has been loading for 130 s"
    for number in numbers:
        loads.end(number)
    assert not loads.empty


def test_many_loads_are_reported_in_few_lines() -> None:
    loads = LongLoads(20, 0, explicit=False)
    numbers = [loads.begin(f"m{number}", 1, 0) for number in range(200)]
    for number in numbers[:20]:
        loads.turn(number)
    lines = loads.due(61 * SECOND_NS)
    assert len(lines) == 10
    assert lines[8:] == [
        "12 more models have been loading for as long",
        "model 'm20' version 1 and 179 more have waited for 61 s until other models are loaded: 'm0', 'm1', 'm2' and "
        "17 more (--model-load-thread-count=20)",
    ]
    assert loads.due(62 * SECOND_NS) == []


def test_the_log_has_a_load_that_takes_long(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(running_loads, "LOOK_S", 0)
    clock = FakeClock()

    async def scenario() -> None:
        with LoadReports(LongLoads(4, 0, explicit=False), clock).of("m", 1) as got_turn:
            got_turn()
            clock.advance(60 * SECOND_NS)
            await until(lambda: "model 'm' version 1 has been loading for 60 s" in caplog.text)

    asyncio.run(scenario())
