"""Models that are loaded, changed and unloaded under the rate limiter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.errors import ModelLoadFailed
from kernel.limiting.instance_gate import RateLimiting
from kernel.repository.settings import LifecycleSettings
from kernel.repository.testing import CONFIG, RepositoryLab, run, settled
from schedulers.direct import direct
from schedulers.ratelimit import RateLimiter, parse_limits

if TYPE_CHECKING:
    from pathlib import Path


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
        assert limiter._needs == {}

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
        [registered] = limiter._needs.values()
        assert max(count for each in registered for count in each.counts.values()) == 2
        await lab.lifecycle.unload("m")
        await settled()
        assert limiter._needs == {}

    run(lab, scenario)
