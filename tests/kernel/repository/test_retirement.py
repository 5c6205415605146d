"""Versions and instances that were unloaded or replaced: their last requests get a limited time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kernel.errors import NotFinishedInTime, ServerStopping
from kernel.repository.retirement import RELEASED_WAIT_S
from kernel.repository.settings import LifecycleSettings
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from schedulers.direct import direct
from shm.tensor import Tensor
from tests.kernel.repository_lab import CONFIG, RepositoryLab, run, settled, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kernel.repository_lab import FakeKeeper


def lab_with(root: Path, limit_s: float) -> RepositoryLab:
    lab = RepositoryLab(root, direct, LifecycleSettings((root,), explicit=True, unload_timeout_s=limit_s))
    lab.write("m")
    return lab


def submit(lab: RepositoryLab) -> Request:
    """Submit a request; the model hangs: no instance executes it."""
    model = lab.catalog.resolve("m")
    for keeper in lab.keepers:
        assert keeper.instance is not None
        model.instances.set_apart(keeper.instance)
    request = Request("m", [Tensor("IN", "FP32", [1], bytes(4))], RecordingSink())
    model.submit(request)
    return request


def errors(request: Request) -> list[type]:
    assert isinstance(request.sink, RecordingSink)
    return [type(error) for error in request.sink.errors]


@pytest.mark.parametrize("reload", [False, True])
def test_requests_that_are_not_finished_in_time_fail_and_the_workers_are_killed(tmp_path: Path, reload: bool) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        request, old = submit(lab), lab.keepers[0]
        if reload:
            lab.write("m", config=CONFIG + "max_batch_size: 0 parameters { key: 'a' value { string_value: 'b' } }")
            await lab.lifecycle.load("m")
            assert lab.catalog.index()[0].state == "READY"
        else:
            await lab.lifecycle.unload("m")
            assert lab.catalog.index()[0].state == "UNLOADING"
        await until(lambda: old.stopped)
        assert old.stopped_at_once
        assert errors(request) == [NotFinishedInTime]
        await settled()
        assert lab.catalog.retiring == set()
        assert lab.catalog.index()[0].reason == ("" if reload else "unloaded")

    run(lab_with(tmp_path, 0.01), scenario)


def test_requests_that_finish_in_time_get_their_responses_and_the_model_is_finalized(tmp_path: Path) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        request, keeper = submit(lab), lab.keepers[0]
        [model] = lab.catalog.executing_models()
        await lab.lifecycle.unload("m")
        await settled()
        assert not keeper.stopped
        assert lab.catalog.executing_models() == [model], "a server that stops waits for it too"
        assert keeper.instance is not None
        model.instances.add(keeper.instance)
        await until(lambda: keeper.stopped)
        assert (request.finished, errors(request), keeper.stopped_at_once) == (True, [], False)

    run(lab_with(tmp_path, 3600), scenario)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_server_that_stops_ends_what_is_being_unloaded(tmp_path: Path, at_once: bool) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        request, keeper = submit(lab), lab.keepers[0]
        await lab.lifecycle.unload("m")
        await settled()
        await lab.lifecycle.close(at_once=at_once)
        assert errors(request) == [ServerStopping]
        assert (keeper.stopped, keeper.stopped_at_once) == (True, at_once)
        assert lab.catalog.retiring == set()

    run(lab_with(tmp_path, 3600), scenario)


def test_a_server_that_stops_finishes_the_end_of_a_worker_that_had_begun(tmp_path: Path) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        [keeper] = lab.keepers
        keeper.stopping = asyncio.Event()  # the model is being finalized
        await lab.lifecycle.unload("m")
        await settled()
        closing = asyncio.ensure_future(lab.lifecycle.close())
        await settled()
        assert not closing.done()
        keeper.stopping.set()
        await closing
        assert keeper.stopped

    run(lab_with(tmp_path, 3600), scenario)


def test_a_removed_instance_gets_the_same_limit(tmp_path: Path) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        lab.write("m", config=CONFIG + "instance_group [{ count: 2 }]")
        await lab.lifecycle.load("m")
        removed: FakeKeeper = lab.keepers[1]
        lab.write("m", config=CONFIG + "instance_group [{ count: 1 }]")
        await lab.lifecycle.load("m")
        await settled()
        assert (removed.retired_with, removed.stopped) == (7.0, True)
        assert removed.released_with == RELEASED_WAIT_S

    run(lab_with(tmp_path, 7.0), scenario)


def test_a_version_that_has_ended_waits_for_tensors_that_other_models_use_and_a_killed_one_does_not(
    tmp_path: Path,
) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        [keeper] = lab.keepers
        await lab.lifecycle.unload("m")
        await until(lambda: keeper.stopped)
        assert keeper.released_with == RELEASED_WAIT_S
        await lab.lifecycle.load("m")
        submit(lab)
        await lab.lifecycle.unload("m")
        await until(lambda: lab.keepers[-1].stopped)
        assert lab.keepers[-1].released_with == 0

    run(lab_with(tmp_path, 0.01), scenario)
