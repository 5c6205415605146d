"""Workers that Ray places, with a played cluster: what a launch waits for, what ends with what, and lost brokers.

`tests/backends/hosts/with_ray.py` has tests with Ray itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from backends.hosts.ray_broker import placement_options, text_of
from backends.hosts.ray_launcher import resources_of, waits_for
from backends.hosts.ray_messages import ClusterNode, Place
from backends.launch.launcher import HostCapacity, OwnedWorker
from kernel.errors import InvalidArgument, Unsupported
from kernel.repository.worker_needs import WorkerNeeds
from kernel.server_parts import LauncherFigures
from tests.backends.hosts.played_ray import HOST, PlayedRay, played_ray
from tests.backends.launch.started_workers import end_of, hello_of, run, until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerNeeds:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of the agents
    return needing(tmp_path)


def needing(tmp_path: Path, **more: object) -> WorkerNeeds:
    folder = tmp_path / "models" / "m"
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1" / "weights").write_bytes(b"weights" * 1000)
    return WorkerNeeds("identity", folder=str(folder), version=1, **more)  # type: ignore[arg-type]


def test_a_worker_has_an_agent_of_its_own_which_ends_with_it(needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with played_ray() as (launcher, cluster, _):
            worker = await launcher.launch("m_0", needs=needs)
            await hello_of(worker)
            assert worker.host == HOST
            assert launcher.owned() == [OwnedWorker("m_0", HOST)]
            assert launcher.capacity() == [HostCapacity(HOST, "", 1, None)]
            assert launcher.figures() == LauncherFigures("ray", True, 0, {HOST: 1})
            (actor,) = cluster.actors.values()
            assert actor.options["lifetime"] == "detached"
            worker.kill()
            assert await end_of(worker) == f"killed by signal 9 (SIGKILL), on host '{HOST}'"
            worker.socket.close()
            await until(lambda: not cluster.actors)
            assert launcher.owned() == []

    run(main())


def test_a_launch_waits_for_what_the_cluster_has_not_and_can_be_cancelled(tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with played_ray(PlayedRay(GPU=1)) as (launcher, cluster, _):
            on_gpu = needing(tmp_path, resources=(("gpus", 1.0),))
            first = await launcher.launch("m_0", needs=on_gpu)
            texts = list[str]()
            second = asyncio.create_task(launcher.launch("m_1", needs=on_gpu, pending=texts.append))
            await until(lambda: len(cluster.actors) == 2)
            assert texts[-1] == "waiting for resources: 1 CPU, 1 GPU"
            assert launcher.owned() == [OwnedWorker("m_0", HOST), OwnedWorker("m_1", "")]
            assert launcher.figures().pending == 1
            second.cancel()
            await asyncio.wait([second])
            await until(lambda: len(cluster.actors) == 1)  # Ray does not wait for it any more
            third = asyncio.create_task(launcher.launch("m_2", needs=on_gpu))
            await until(lambda: len(cluster.actors) == 2)
            first.kill()
            await end_of(first)
            first.socket.close()
            worker = await third
            worker.kill()
            await end_of(worker)
            worker.socket.close()

    run(main())


def test_a_broker_that_dies_is_started_again_and_finds_workers_and_waits_again(
    tmp_path: Path, needs: WorkerNeeds
) -> None:
    async def main() -> None:
        async with played_ray(PlayedRay(GPU=1)) as (launcher, cluster, start):
            on_gpu = needing(tmp_path, resources=(("gpus", 1.0),))
            first = await launcher.launch("m_0", needs=on_gpu)
            await hello_of(first)
            second = asyncio.create_task(launcher.launch("m_1", needs=on_gpu))
            await until(lambda: len(cluster.actors) == 2)
            start.started[0].kill()
            await until(lambda: cluster.brokers == 2 and not launcher.trouble)
            assert not first.has_ended
            assert launcher.owned() == [OwnedWorker("m_0", HOST), OwnedWorker("m_1", "")]
            first.kill()
            await end_of(first)
            first.socket.close()
            worker = await second
            assert len(cluster.actors) == 1, "the new broker did not ask for it once more"
            worker.kill()
            await end_of(worker)
            worker.socket.close()

    run(main())


def test_without_a_response_of_the_cluster_workers_serve_on_and_the_reason_is_shown(needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with played_ray() as (launcher, cluster, start):
            first = await launcher.launch("m_0", needs=needs)
            await hello_of(first)
            cluster.failure = ConnectionError("Failed to connect to GCS\nat 10.0.0.1:6379")
            start.started[0].kill()
            reason = "Failed to connect to GCS at 10.0.0.1:6379"
            await until(lambda: launcher.trouble == reason)
            assert launcher.figures() == LauncherFigures("ray", False, 0, {HOST: 1})
            texts = list[str]()
            second = asyncio.create_task(launcher.launch("m_1", needs=needs, pending=texts.append))
            await until(lambda: bool(texts))
            assert texts == [f"waiting for resources: 1 CPU (Ray: {reason})"]
            assert not first.has_ended
            cluster.failure = None
            worker = await second
            for each in (first, worker):
                each.kill()
                await end_of(each)
                each.socket.close()

    run(main())


def test_what_ray_refuses_fails_the_launch(tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with played_ray() as (launcher, _, _):
            with pytest.raises(InvalidArgument, match="Ray has not placed the worker of 'm_0': GPU .* whole numbers"):
                await launcher.launch("m_0", needs=needing(tmp_path, resources=(("gpus", 1.5),)))
            assert launcher.owned() == []

    run(main())


def test_a_lost_connection_ends_the_worker_and_its_agent(needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with played_ray() as (launcher, cluster, _):
            worker = await launcher.launch("m_0", needs=needs)
            await hello_of(worker)
            kept = worker.socket.dup()  # the worker does not see that its server has given it up
            launcher.agents[0].close()
            await until(lambda: not cluster.actors)
            kept.close()
            worker.socket.close()

    run(main())


def test_an_agent_that_no_server_connects_with_ends_after_the_lease() -> None:
    cluster = PlayedRay()
    place = Place("a", 1.0, 0.0, 0, {}, False, 0.01)
    cluster.options(**placement_options(place)).remote(0.01, None)
    cluster.join()
    assert not cluster.actors


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (WorkerNeeds(gpu=True), r"reserves GPUs by the parameter naiad.resources \(gpus=1\)"),
        (WorkerNeeds(worker="shared"), "launcher 'ray' starts no worker that models share .naiad.worker 'shared'"),
    ],
)
def test_what_it_cannot_start_is_refused_at_once(needs: WorkerNeeds, text: str) -> None:
    async def main() -> None:
        async with played_ray() as (launcher, _, _):
            with pytest.raises(Unsupported, match=text):
                await launcher.launch("m_0", needs=needs)

    run(main())


def test_a_worker_needs_a_cpu_if_nothing_else_is_said() -> None:
    assert resources_of(WorkerNeeds()) == {"CPU": 1.0}
    asked = WorkerNeeds(
        host="10.0.0.2", memory_limit_byte_size=1 << 30, resources=(("cpus", 0.0), ("gpus", 0.5), ("tpu", 2.0))
    )
    assert resources_of(asked) == {"GPU": 0.5, "tpu": 2.0, "memory": float(1 << 30), "node:10.0.0.2": 0.001}
    assert resources_of(WorkerNeeds(memory_limit_byte_size=1, resources=(("memory", 2.0),)))["memory"] == 2.0


def test_the_text_says_what_is_waited_for_and_whether_it_can_come() -> None:
    node = ClusterNode("10.0.0.2", {"CPU": 4.0, "memory": 8e9, "node:10.0.0.2": 1.0})
    assert waits_for({"CPU": 1.0}, (node,)) == "waiting for resources: 1 CPU"
    assert waits_for({"CPU": 1.0}, ()) == "waiting for resources: 1 CPU"
    assert waits_for({"CPU": 1.0, "node:10.0.0.2": 0.001}, (node,)) == (
        "waiting for resources: 1 CPU, host '10.0.0.2' (naiad.host)"
    )
    assert waits_for({"GPU": 1.0, "memory": float(1 << 30)}, (node,)) == (
        "waiting for resources: 1 GPU, 1024 MiB of memory; none of the 1 hosts of the Ray cluster has that much"
    )


def test_options_of_an_actor() -> None:
    spread = placement_options(Place("a", 1.0, 0.0, 0, {"tpu": 1.0}, True, 60.0))
    assert (spread["scheduling_strategy"], spread["memory"], spread["max_restarts"]) == ("SPREAD", None, 0)
    assert placement_options(Place("a", 1.0, 0.0, 5, {}, False, 60.0))["scheduling_strategy"] == "DEFAULT"


def test_texts_of_ray_are_shortened_to_their_first_and_last_lines() -> None:
    assert text_of(RuntimeError("The actor died.\n  traceback\nModuleNotFoundError: no backends\n")) == (
        "The actor died. ModuleNotFoundError: no backends"
    )
    assert text_of(KeyError()) == "KeyError"
    assert len(text_of(RuntimeError("x" * 1000))) < 520
