"""Which launcher starts a worker, what a start waits for, and where a worker finds the files of its model.

When a dead worker is started again.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from backends.launch.launcher import (
    DELAYS_S,
    ENTRY_POINT_GROUP,
    Backoff,
    HostCapacity,
    LauncherSet,
    OwnedWorker,
    packaged_launcher,
)
from backends.launch.output import OutputLimits
from backends.supervision.session import WorkerSession
from backends.transport import wire
from kernel.errors import InvalidArgument
from kernel.repository.worker_needs import WorkerNeeds
from tests.backends.supervision.played_worker import FakeWorker


class Elsewhere(FakeWorker):
    """Starts workers on another host, which finds models in another folder."""

    def __init__(self) -> None:
        super().__init__()
        self.host = "far"
        self.folders["/models/m"] = "/copies/0123"

    def check(self, needs: WorkerNeeds) -> None:
        pass

    def owned(self) -> list[OwnedWorker]:
        return []

    def capacity(self) -> list[HostCapacity]:
        return [HostCapacity("far", "", 0, None)]

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def figures(self) -> None:
        return None


def chosen(needs: WorkerNeeds, *, helper: bool = False, default: str = "local") -> str:
    local, first, second = FakeWorker(), Elsewhere(), Elsewhere()
    workers = {"local": local, "first": first, "second": second}
    try:
        launchers = LauncherSet(local, {"first": first, "second": second}, default)
        asyncio.run(launchers.launch("m_0", helper=helper, needs=needs))
    finally:
        for worker in workers.values():
            worker.channel.close()
            worker.socket.close()
    [name] = [name for name, worker in workers.items() if worker.helps]
    return name


def test_a_model_chooses_its_launcher() -> None:
    assert chosen(WorkerNeeds(launcher="second")) == "second"
    assert chosen(WorkerNeeds(launcher="local"), default="first") == "local"


def test_a_model_that_chooses_none_has_the_default_one() -> None:
    assert chosen(WorkerNeeds()) == "local"
    assert chosen(WorkerNeeds(), default="first") == "first"


def test_a_launcher_that_the_server_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"no launcher 'x' .*has 'local', 'first', 'second' \(--launcher\)"):
        chosen(WorkerNeeds(launcher="x"))


def test_a_host_is_for_launchers_of_other_hosts() -> None:
    assert chosen(WorkerNeeds(launcher="first", host="far")) == "first"
    with pytest.raises(InvalidArgument, match="'m_0' is to be on host 'far' .*launcher 'local' starts its workers on"):
        chosen(WorkerNeeds(host="far"))


def test_a_launcher_that_no_package_has_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--launcher: there is no launcher 'slurm'; launchers are agent, local"):
        packaged_launcher("slurm", OutputLimits())


def test_a_package_adds_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("far", f"{__name__}:made_launcher", ENTRY_POINT_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: EntryPoints([point]).select(group=group))
    found = packaged_launcher("far", OutputLimits(7))
    assert isinstance(found, Elsewhere)
    found.channel.close()
    found.socket.close()


def made_launcher(limits: OutputLimits) -> Elsewhere:
    assert limits.lines_per_s == 7
    return Elsewhere()


def test_a_helper_is_always_on_this_machine() -> None:
    assert chosen(WorkerNeeds(), helper=True, default="first") == "local"


def test_a_start_says_what_it_waits_for_and_messages_name_the_folder_that_the_worker_has() -> None:
    async def main() -> None:
        worker, session = Elsewhere(), WorkerSession("m_0")
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
