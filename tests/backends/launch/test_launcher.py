"""Which launcher starts a worker, what a start waits for, and where a worker finds the files of its model.

When a dead worker is started again.
"""

from __future__ import annotations

import asyncio

from backends.launch.launcher import DELAYS_S, Backoff, LauncherSet
from backends.supervision.session import WorkerSession
from backends.transport import wire
from kernel.repository.worker_needs import WorkerNeeds
from tests.backends.supervision.played_worker import FakeWorker


class Elsewhere(FakeWorker):
    """Starts workers of one backend on another host, which finds models in another folder."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.folders["/models/m"] = "/copies/0123"

    def takes(self, needs: WorkerNeeds) -> bool:
        return needs.backend == self.backend


def chosen(needs: WorkerNeeds, *, helper: bool = False) -> str:
    local, first, second = FakeWorker(), Elsewhere("python"), Elsewhere("python")
    workers = {"local": local, "first": first, "second": second}
    asyncio.run(LauncherSet(local, first, second).launch("m_0", helper=helper, needs=needs))
    for worker in workers.values():
        worker.channel.close()
        worker.socket.close()
    [name] = [name for name, worker in workers.items() if worker.helps]
    return name


def test_the_first_launcher_that_takes_a_model_starts_its_workers() -> None:
    assert chosen(WorkerNeeds("python")) == "first"


def test_what_no_other_launcher_takes_is_started_on_this_machine() -> None:
    assert chosen(WorkerNeeds("onnxruntime")) == "local"


def test_a_helper_is_always_on_this_machine() -> None:
    assert chosen(WorkerNeeds("python"), helper=True) == "local"


def test_a_start_says_what_it_waits_for_and_messages_name_the_folder_that_the_worker_has() -> None:
    async def main() -> None:
        worker, session = Elsewhere("python"), WorkerSession("m_0")
        worker.channel.send(wire.Hello(wire.PROTOCOL, 1, local=False))
        worker.waited_for = ["a host with a GPU is started", ""]
        shown: list[str] = []
        await session.start(LauncherSet(worker), needs=WorkerNeeds("python"), pending=shown.append)
        assert shown == ["a host with a GPU is started", ""]
        load = wire.Load("{}", "/models/m", 1, "m_0")
        loading = asyncio.create_task(session.load(load))
        await asyncio.sleep(0)
        session.flush()
        received = worker.channel.receive()
        assert received is not None
        found = wire.to_worker_decoder.decode(received[0])
        assert isinstance(found, wire.Load)
        assert (found.model_dir, load.model_dir) == ("/copies/0123", "/models/m")
        worker.channel.send(wire.Loaded(5))
        assert await loading == 5
        worker.kill()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_the_first_restart_is_at_once_and_later_ones_wait_longer() -> None:
    backoff = Backoff()
    delays = [backoff.next_delay_s() for _ in range(len(DELAYS_S) + 1)]
    assert delays == [*DELAYS_S, DELAYS_S[-1]]
    assert delays[0] == 0


def test_a_useful_worker_ends_the_series() -> None:
    backoff = Backoff()
    backoff.next_delay_s()
    backoff.next_delay_s()
    backoff.reset()
    assert backoff.next_delay_s() == 0
