"""Samples are taken in portions, and end with the front door."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernel.testing import model_spec
from protocols.http.dashboard import sampler as module
from protocols.http.dashboard.sampler import HistorySampler
from tests.protocols.front_door_lab import FrontDoorLab

if TYPE_CHECKING:
    import pytest


async def iterations(sampler: HistorySampler, number: int) -> int:
    """Return how many event-loop iterations pass until `number` samples are complete."""
    passed = 0
    while sampler.history is None or sampler.history.number < number:
        await asyncio.sleep(0)
        passed += 1
    return passed


def test_the_event_loop_serves_others_between_the_portions_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PORTION", 4)

    async def test() -> None:
        lab = FrontDoorLab()
        for number in range(10):
            lab.add_model(model_spec(f"m{number}"), lambda request: None)
        sampler = HistorySampler(lab.kernel, lab.clock.now_ns)
        sampler.sample()
        assert sampler.history is not None
        assert sampler.history.number == 0
        assert await iterations(sampler, 1) >= 2
        sampler.stop()

    asyncio.run(test())


def test_a_sampler_that_is_stopped_leaves_nothing_behind() -> None:
    async def test() -> None:
        sampler = HistorySampler(FrontDoorLab().kernel)
        sampler.start()
        sampler.sample()
        sampler.stop()
        assert sampler._timer is None
        sampler.stop()

    asyncio.run(test())
