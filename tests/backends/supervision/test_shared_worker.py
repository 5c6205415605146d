"""A process of several models from its first model to its last, and its loss."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from backends.launch.launcher import Pending, not_shown
from backends.launch.output import OutputLimits
from backends.supervision import shared_worker as shared_member
from backends.supervision.shared_worker import SharedProcess, SharedWorkers
from backends.transport import wire
from kernel.errors import Unavailable, Unsupported
from kernel.repository.placement import InstancePlan
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds
from tests.backends.supervision.played_worker import FakeWorker, settle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from backends.launch.launcher import Announce
    from backends.supervision.shared_worker import SharedWorker


class PlayedProcess:
    """Launches processes that the test plays. Each has said hello."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.titles: list[str] = []

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> FakeWorker:
        worker = FakeWorker()
        worker.channel.send(wire.Hello(wire.PROTOCOL, 1))
        self.workers.append(worker)
        self.titles.append(title)
        return worker


class SharedBench:
    """A shared process, and why each of its members has ended."""

    def __init__(self) -> None:
        self.played = PlayedProcess()
        self.process = SharedProcess("small", self.played, OutputLimits())
        self.causes: dict[str, str] = {}
        self.lost: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        #: The workers' ends of the members' connections, by their numbers.
        self.connections: dict[int, socket.socket] = {}

    async def add(self, title: str) -> SharedWorker:
        member = await self.process.launch(title)

        def lost(cause: str) -> None:
            self.causes[title] = cause
            self.lost[title].set()

        member.on_lost(lost)
        return member

    async def received(self, process: int = -1) -> list[wire.ToWorker]:
        """Return what a process was sent since the last time; take the connections of new members."""
        await settle()
        channel, messages = self.played.workers[process].channel, list[wire.ToWorker]()
        while raw := channel.receive(wait=False):
            messages += map(wire.to_worker_decoder.decode, raw)
        for message in messages:
            if isinstance(message, wire.AddMember) and not message.address:
                self.connections[message.member] = socket.socket(fileno=channel.take_fd())
        return messages

    async def say(self, message: wire.ToKernel) -> None:
        self.played.workers[-1].channel.send(message)
        await settle()

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


def run(scenario: Callable[[SharedBench], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        bench = SharedBench()
        await scenario(bench)
        bench.close()

    asyncio.run(asyncio.wait_for(main(), 30))


class FarWorker(FakeWorker):
    """A process on another host: it has no descriptors, and opens each connection itself when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

    async def connect(self, announce: Announce) -> socket.socket:
        announce(address="192.0.2.1:99", token=b"secret")
        return await self.opened


@contextlib.asynccontextmanager
async def far_bench() -> AsyncIterator[tuple[SharedBench, FarWorker]]:
    bench, worker = SharedBench(), FarWorker()
    worker.channel.send(wire.Hello(wire.PROTOCOL, 1, local=False))
    bench.process = SharedProcess("small", worker, OutputLimits())
    bench.played.workers.append(worker)
    yield bench, worker
    worker.die("killed")
    await settle()


def test_the_launcher_gives_the_connection_of_a_model_and_no_descriptor_is_passed() -> None:
    async def main() -> None:
        async with far_bench() as (bench, worker):
            adding = asyncio.create_task(bench.process.launch("a"))
            await settle()
            raw = worker.channel.receive()
            assert [wire.to_worker_decoder.decode(each) for each in raw or ()] == [
                wire.AddMember(1, "a", "192.0.2.1:99", b"secret")
            ]
            ours, theirs = socket.socketpair()
            worker.opened.set_result(ours)
            member = await adding
            assert member.socket is ours
            theirs.close()
            member.socket.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_model_whose_process_cannot_open_its_connection_fails_and_the_process_ends() -> None:
    async def main() -> None:
        async with far_bench() as (bench, worker):
            adding = asyncio.create_task(bench.process.launch("a"))
            await settle()
            worker.channel.send(wire.MemberEnded(1, "it cannot connect"))
            await settle()
            ours, theirs = socket.socketpair()
            worker.opened.set_result(ours)
            with pytest.raises(Unavailable, match="'a' did not get into worker 'small': it cannot connect"):
                await adding
            assert ours.fileno() == -1
            theirs.close()
            await settle()
            assert wire.Stop() in await bench.received()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_models_are_added_to_one_process() -> None:
    async def scenario(bench: SharedBench) -> None:
        first, second = await asyncio.gather(bench.add("a"), bench.add("b"))
        assert bench.played.titles == ["worker small"]
        assert await bench.received() == [wire.AddMember(1, "a"), wire.AddMember(2, "b")]
        first.socket.sendall(b"for a")
        assert bench.connections[1].recv(99) == b"for a"
        assert not first.stopped
        bench.played.workers[0].is_stopped = True
        assert first.stopped
        assert second.stopped
        for member in (first, second):
            member.socket.close()
        bench.played.workers[0].die("killed")

    run(scenario)


def test_the_loss_of_the_process_is_the_loss_of_all_and_names_the_others() -> None:
    async def scenario(bench: SharedBench) -> None:
        members = [await bench.add(name) for name in ("a", "b", "c", "d", "e", "f", "g")]
        await bench.received()
        bench.played.workers[0].die("killed by signal 11 (SIGSEGV)")
        assert bench.causes["a"] == (
            "killed by signal 11 (SIGSEGV); it shared worker 'small' with 'b', 'c', 'd', 'e', 'f' and 1 more"
        )
        assert len(bench.causes) == 7
        for member in members:
            member.socket.close()
        alone = await bench.add("again")
        assert bench.played.titles == ["worker small"] * 2
        await bench.received()
        bench.played.workers[1].die("exit code 3")
        assert bench.causes["again"] == "exit code 3; it was the only model of worker 'small'"
        alone.socket.close()

    run(scenario)


def test_the_last_model_ends_the_process_and_the_next_one_gets_a_new_one() -> None:
    async def scenario(bench: SharedBench) -> None:
        first, second = await bench.add("a"), await bench.add("b")
        await bench.received()
        await bench.say(wire.MemberEnded(1))
        assert bench.causes == {"a": "it has ended"}
        assert await bench.received() == []
        await bench.say(wire.MemberEnded(2, "KeyError: 7"))
        assert bench.causes["b"] == "KeyError: 7"
        assert await bench.received() == [wire.Stop()]
        stopping = asyncio.ensure_future(second.stop(5))
        third = await bench.add("c")
        assert len(bench.played.workers) == 2
        await settle()
        bench.played.workers[0].die("exit code 0")
        await first.stop(5)
        assert "c" not in bench.causes
        await bench.received()
        bench.played.workers[1].die("killed")
        await stopping
        for member in (first, second, third):
            member.socket.close()

    run(scenario)


def test_a_killed_model_loses_its_connection_and_leaves_the_others() -> None:
    async def scenario(bench: SharedBench) -> None:
        first, second = await bench.add("a"), await bench.add("b")
        await bench.received()
        first.kill()
        first.kill()
        assert bench.connections[1].recv(1) == b""
        await bench.say(wire.MemberEnded(1))
        assert bench.causes == {"a": "it has ended"}
        assert not first.stopped
        bench.played.workers[0].die("killed")
        for member in (first, second):
            member.socket.close()

    run(scenario)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_model_that_does_not_leave_is_ended_with_its_process(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_member, "LEAVE_GRACE_S", 0.01)

    async def scenario(bench: SharedBench) -> None:
        first, second = await bench.add("a"), await bench.add("b")
        await bench.received()
        if how == "kill":
            first.kill()
        else:
            await first.stop(0.01)
        await bench.lost["b"].wait()
        assert bench.causes["b"].startswith("killed by signal 9 (SIGKILL); it shared worker 'small' with 'a'")
        for member in (first, second):
            member.socket.close()

    run(scenario)


def test_to_end_an_execution_ends_the_process() -> None:
    async def scenario(bench: SharedBench) -> None:
        member = await bench.add("a")
        await bench.received()
        member.terminate()
        assert bench.played.workers[0].terminated
        bench.played.workers[0].die("killed by signal 15 (SIGTERM)")
        late: list[str] = []
        member.on_lost(late.append)
        await settle()
        assert late == ["killed by signal 15 (SIGTERM); it was the only model of worker 'small'"]
        member.socket.close()

    run(scenario)


def test_a_process_that_says_what_it_should_not_is_dropped() -> None:
    async def scenario(bench: SharedBench) -> None:
        member = await bench.add("a")
        await bench.received()
        await bench.say(wire.MemberEnded(99))
        assert bench.causes["a"].startswith("killed by signal 9 (SIGKILL); it sent an invalid message")
        member.socket.close()

    run(scenario)


def plan(name: str, cpus: tuple[int, ...], policy: str = "cpu") -> InstancePlan:
    return InstancePlan(name, "/m", 1, host_policy=policy, cpus=cpus, needs=WorkerNeeds(worker="small"))


def test_instances_with_other_processors_are_refused() -> None:
    shared = SharedWorkers(PlayedProcess(), OutputLimits())
    first, second, third = object(), object(), object()
    shared.join(first, plan("a_0", (0, 1)))
    shared.join(second, plan("b_0", (0, 1)))
    with pytest.raises(Unsupported) as caught:
        shared.join(third, plan("c_0", (), "mine"))
    assert caught.value.message == (
        "model instance 'c_0' cannot share worker 'small' (parameter naiad.worker) with 'a_0': their host policies "
        "'mine' and 'cpu' give them different processors (all and 0, 1)"
    )
    for keeper, name in ((first, "a_0"), (second, "b_0"), (third, "c_0")):
        shared.leave(keeper, plan(name, (0, 1)))
    shared.join(third, plan("c_0", (), "mine"))


def test_one_name_is_one_process() -> None:
    shared = SharedWorkers(PlayedProcess(), OutputLimits())
    assert shared.launcher("a") is shared.launcher("a") is not shared.launcher("b")


def test_a_process_is_for_models_on_gpus_or_for_others() -> None:
    async def scenario(bench: SharedBench) -> None:
        member = await bench.process.launch("a_0", needs=WorkerNeeds(worker="small", gpu=True))
        with pytest.raises(Unsupported) as caught:
            await bench.process.launch("b_0", needs=WorkerNeeds(worker="small"))
        assert caught.value.message == (
            "model instance 'b_0' cannot share worker 'small' (parameter naiad.worker): it is on the CPU, and the "
            "process was started for models on GPUs. Models on GPUs share another worker, and name KIND_GPU in their "
            "instance groups"
        )
        await bench.received()
        member.socket.close()
        bench.played.workers[0].die("killed")

    run(scenario)
