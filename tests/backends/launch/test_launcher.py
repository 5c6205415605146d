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
    Pending,
    not_shown,
    packaged_launcher,
)
from backends.launch.output import OutputLimits
from backends.supervision.session import WorkerSession
from backends.transport import wire
from kernel.errors import InvalidArgument
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds
from tests.backends.supervision.played_worker import FakeWorker


class Elsewhere(FakeWorker):
    """Starts workers on another host, which finds models in another folder."""

    def __init__(self) -> None:
        super().__init__()
        self.host = "far"
        self.folders["/models/m"] = "/copies/0123"
        self.hosts = [HostCapacity("far", "", 0, None)]

    def check(self, needs: WorkerNeeds) -> None:
        pass

    def owned(self) -> list[OwnedWorker]:
        return []

    def capacity(self) -> list[HostCapacity]:
        return self.hosts

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def figures(self) -> None:
        return None


class Locals(FakeWorker):
    """Starts workers on this machine, each one anew."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[FakeWorker] = []

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> FakeWorker:
        self.helps.append(helper)
        self.started.append(FakeWorker())
        return self.started[-1]


def chosen(needs: WorkerNeeds, *, helper: bool = False, default: str = "local", alone: bool = False) -> str:
    local, first, second = FakeWorker(), Elsewhere(), Elsewhere()
    workers = {"local": local, "first": first, "second": second}
    try:
        launchers = LauncherSet(local, {} if alone else {"first": first, "second": second}, default)
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
    with pytest.raises(
        InvalidArgument, match="--launcher: there is no launcher 'slurm'; launchers are agent, auto, local, ray"
    ):
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


@pytest.mark.parametrize(
    ("needs", "places"),
    [
        (WorkerNeeds(), ["local", "local", "first"]),
        (WorkerNeeds(gpu=True), ["local"] * 3),
        (WorkerNeeds(worker="shared"), ["local"] * 3),
        (WorkerNeeds(host="far"), ["first"] * 3),
        (WorkerNeeds(resources=(("gpus", 1.0),)), ["first"] * 3),
        (WorkerNeeds(placement="spread"), ["first"] * 3),
        (WorkerNeeds(launcher="second"), ["second"] * 3),
    ],
)
def test_workers_of_auto_are_on_this_machine_while_it_has_room(needs: WorkerNeeds, places: list[str]) -> None:
    assert automatic([needs] * 3) == places


def test_workers_of_auto_that_have_ended_leave_room() -> None:
    assert automatic([WorkerNeeds()] * 3, dying=True) == ["local"] * 3


def test_auto_takes_the_first_launcher_that_has_room_and_else_waits_at_the_first() -> None:
    full, out_of_order = HostCapacity("far", "", 3, 3), HostCapacity("far", "it is lost", 0, None)
    assert automatic([WorkerNeeds(host="far")], full) == ["second"]
    assert automatic([WorkerNeeds(host="far")], out_of_order) == ["second"]
    assert automatic([WorkerNeeds(host="far")], full, full) == ["first"]


def test_auto_without_other_hosts_is_local() -> None:
    assert chosen(WorkerNeeds(launcher="auto"), alone=True) == "local"


def automatic(needs: list[WorkerNeeds], *capacities: HostCapacity, dying: bool = False) -> list[str]:
    """Return where workers are started that `auto` places, with room for two on this machine."""
    local, others = Locals(), {"first": Elsewhere(), "second": Elsewhere()}
    workers: dict[str, FakeWorker] = {"local": local, **others}
    for other, capacity in zip(others.values(), capacities, strict=False):
        other.hosts = [capacity]
    launchers = LauncherSet(local, others, "auto", 2)
    found = []
    try:
        for each in needs:
            before = {name: len(worker.helps) for name, worker in workers.items()}
            launched = asyncio.run(launchers.launch("m_0", needs=each))
            found += [name for name, worker in workers.items() if len(worker.helps) > before[name]]
            if dying:
                launched.kill()
    finally:
        for worker in (*workers.values(), *local.started):
            worker.channel.close()
            worker.socket.close()
    return found


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
