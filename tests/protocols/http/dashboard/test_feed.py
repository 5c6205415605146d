"""Snapshots: what changes is sent, what does not is not, and the event loop serves others meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kernel.serving.catalog import ModelState
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import RecordingSink, model_spec
from protocols.http.dashboard import feed
from protocols.http.dashboard.feed import PORTION_S, Feed, rows_for
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

S = 1_000_000_000


def silent(request: Request) -> None:
    """Respond later, or never."""


class FeedLab:
    """A feed with a clock that the test sets."""

    def __init__(self) -> None:
        self.lab = FrontDoorLab()
        self.feed = Feed(self.lab.kernel, self.lab.clock.now_ns, interval_s=0.0)
        self.seen = 0

    async def rows(self, *, all_states: bool = True) -> dict[str, Any]:
        """Make the next snapshot, a second later, and return the rows that it has changed, by name and version."""
        self.lab.clock.time_ns += S
        snapshot = await self.feed.next(self.feed.snapshot.number)
        found = [json.loads(text) for text in rows_for(snapshot, self.seen, all_states=all_states)]
        self.seen = snapshot.number
        return {f"{each['row']['name']} {each['row'].get('version', '')}".strip(): each for each in found}


def run(test: Callable[[FeedLab], Awaitable[None]]) -> None:
    async def inner() -> None:
        await test(FeedLab())

    asyncio.run(inner())


def test_only_rows_that_have_changed_are_sent() -> None:
    async def test(lab: FeedLab) -> None:
        for name in ("a", "b"):
            lab.lab.add_model(model_spec(name), silent)
        assert set(await lab.rows()) == {"a 1", "b 1"}
        assert await lab.rows() == {}
        (model,) = lab.lab.catalog.ready_models("b")
        model.statistics.success.count += 30
        model.statistics.durations.counts[2] += 30
        rows = await lab.rows()
        assert set(rows) == {"b 1"}
        assert rows["b 1"]["row"]["requests"] == 30
        assert 0 < rows["b 1"]["row"]["rate"] <= 30
        assert 0.5 <= rows["b 1"]["row"]["p99_ms"] <= 1

    run(test)


def test_a_model_that_falls_idle_rests_after_its_window() -> None:
    async def test(lab: FeedLab) -> None:
        lab.lab.add_model(model_spec("a"), silent)
        await lab.rows()
        (model,) = lab.lab.catalog.ready_models("a")
        model.statistics.success.count += 50
        changes = [bool(await lab.rows()) for _ in range(30)]
        assert changes[0]
        assert not any(changes[15:])
        shown = lab.feed.snapshot.rows["a", "1"].shown
        assert shown is not None
        assert shown.rate == 0

    run(test)


def test_requests_in_flight_and_the_oldest_are_shown() -> None:
    async def test(lab: FeedLab) -> None:
        waiting: list[Request] = []
        lab.lab.add_model(model_spec("a"), waiting.append)
        (model,) = lab.lab.catalog.ready_models("a")
        await lab.rows()
        for _ in range(2):
            sink = RecordingSink()
            lab.lab.kernel.submit(Request("a", [Tensor("IN", "FP32", [1], bytes(4))], sink))
        rows = await lab.rows()
        assert rows["a 1"]["row"]["in_flight"] == 2
        lab.lab.clock.time_ns += 5 * S
        assert (await lab.rows())["a 1"]["row"]["oldest_ms"] > 5000
        for request in waiting:
            request.respond(Response("a", "1", "", outputs=[]))
        assert "in_flight" not in (await lab.rows())["a 1"]["row"]
        model.check()

    run(test)


def test_states_reasons_and_models_that_go() -> None:
    async def test(lab: FeedLab) -> None:
        catalog = lab.lab.catalog
        lab.lab.add_model(model_spec("a"), silent)
        catalog.set_known({"a", "new", "bad"})
        catalog.set_broken("bad", "no \x1b configuration")
        rows = await lab.rows()
        assert rows["bad"]["reason"] == "no \\u001b configuration"
        assert "state" not in rows["new"]["row"]
        catalog.set_state("a", 1, ModelState.UNAVAILABLE, "unloaded")
        rows = await lab.rows()
        assert (rows["a 1"]["row"]["state"], rows["a 1"]["reason"]) == ("UNAVAILABLE", "unloaded")
        catalog.set_known({"a", "new"})
        catalog.set_broken("bad", None)
        assert await lab.rows() == {}
        assert lab.feed.snapshot.gone == {("bad", ""): lab.seen}

    run(test)


def test_who_may_not_see_the_index_sees_ready_models_without_reasons() -> None:
    async def test(lab: FeedLab) -> None:
        lab.lab.add_model(model_spec("a"), silent)
        lab.lab.catalog.set_broken("bad", "a secret")
        rows = await lab.rows(all_states=False)
        assert list(rows) == ["a 1"]
        assert "reason" not in rows["a 1"]

    run(test)


def test_a_lost_instance_shows_up_although_nothing_else_has_changed() -> None:
    async def test(lab: FeedLab) -> None:
        instance = lab.lab.add_model(model_spec("a"), silent)
        (model,) = lab.lab.catalog.ready_models("a")
        await lab.rows()
        await lab.rows()
        model.instances.lost(instance, [])
        model.instances.add(instance)
        assert (await lab.rows())["a 1"]["row"]["restarts"] == 1

    run(test)


def test_all_viewers_share_one_snapshot() -> None:
    async def test(lab: FeedLab) -> None:
        lab.lab.add_model(model_spec("a"), silent)
        snapshots = await asyncio.gather(*(lab.feed.next(0) for _ in range(10)))
        assert {snapshot.number for snapshot in snapshots} == {1}
        snapshots = await asyncio.gather(*(lab.feed.next(1) for _ in range(10)))
        assert {snapshot.number for snapshot in snapshots} == {2}

    run(test)


def test_a_thousand_models_are_read_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which eight models, after which the feed looks at it, take longer than a portion may."""
    looks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(looks) * 2 * PORTION_S, monotonic=time.monotonic)
    monkeypatch.setattr(feed, "time", clock)

    async def test(lab: FeedLab) -> None:
        for number in range(1000):
            lab.lab.add_model(model_spec(f"m{number}"), silent)
        iterations = 0
        ended = False

        async def count() -> None:
            nonlocal iterations
            while not ended:
                iterations += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        assert len(await lab.rows()) == 1000
        ended = True
        await counting
        assert iterations >= 1000 // 8

    run(test)
