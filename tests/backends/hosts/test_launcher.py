"""Workers of agents: where they are placed, what a launch waits for, what is refused, and what ends with what."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from backends.hosts import agent as agent_module
from backends.hosts.agent import MAX_UNPROVEN, AgentSettings, surplus_of
from backends.hosts.files import ModelCopies
from backends.hosts.launcher import RemoteProcess
from backends.hosts.messages import LOST_BEATS, NotAdmitted, Purpose, Silence, admit, prove, read_token
from backends.launch.launcher import HostCapacity, OwnedWorker
from backends.launch.output import OutputLimits
from kernel.errors import InvalidArgument, Unavailable, Unsupported
from kernel.repository.described_files import describe_launch
from kernel.repository.worker_needs import WorkerNeeds
from tests.backends.hosts.agent_lab import agent_running, launcher_to, waiting_launch
from tests.backends.launch.started_workers import end_of, hello_of, identity_model, run, until


@pytest.fixture
def needs(tmp_path: Path) -> WorkerNeeds:
    return identity_model(tmp_path / "models")


def test_a_launch_waits_for_room_says_so_and_can_be_cancelled(tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        settings = AgentSettings("far", max_workers=1)
        async with agent_running(tmp_path / "c", settings) as (_, address), launcher_to(address) as launcher:
            first = await launcher.launch("m_0", needs=needs)
            texts = list[str]()
            second = asyncio.create_task(launcher.launch("m_1", needs=needs, pending=texts.append))
            await until(lambda: bool(texts))
            assert texts == [
                "waiting for resources: room for 1 worker; host 'far' has 1 of 1 (--max-workers of naiad agent)"
            ]
            assert launcher.capacity() == [HostCapacity("far", "", 1, 1)]
            second.cancel()
            await asyncio.wait([second])
            assert launcher.owned() == [OwnedWorker("m_0", "far")]
            third = asyncio.create_task(launcher.launch("m_2", needs=needs))
            first.kill()
            await end_of(first)
            first.socket.close()
            worker = await third
            assert launcher.owned() == [OwnedWorker("m_2", "far")]
            worker.kill()
            await end_of(worker)
            worker.socket.close()
            assert launcher.owned() == []

    run(main())


def test_a_launch_waits_for_an_agent_and_for_the_host_of_its_plan(tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            nobody = unused.getsockname()
        async with agent_running(tmp_path / "c") as (_, address), launcher_to(nobody, address) as launcher:
            named = WorkerNeeds("identity", folder=needs.folder, version=1, host="other")
            async with waiting_launch(launcher, named, "connected are 'far'") as texts:
                await until(lambda: "connected are 'far'" in texts[-1] and "refused" in texts[-1])
                assert texts[-1].startswith("waiting for resources: host 'other' (naiad.host); connected are 'far' (")

    run(main())


def test_an_agent_that_ends_takes_its_workers_with_it_and_they_count_as_unreachable(
    tmp_path: Path, needs: WorkerNeeds
) -> None:
    async def main() -> None:
        async with agent_running(tmp_path / "c") as (agent, address), launcher_to(address) as launcher:
            worker = await launcher.launch("m_0", needs=needs)
            await hello_of(worker)
            agent.sessions[0].link.end("the test cuts the connection")
            assert "the host was lost (its connection" in await end_of(worker)
            assert worker.unreachable
            worker.socket.close()
            # When the server connects again, the agent ends what it had for it.
            await until(lambda: agent.worker_count == 0)
            again = await launcher.launch("m_0", needs=needs)
            again.kill()
            await end_of(again)
            again.socket.close()

    run(main())


def test_workers_without_their_server_end_after_the_lease(tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with agent_running(tmp_path / "c", AgentSettings("far", lease_s=0.01)) as (agent, address):
            async with launcher_to(address) as launcher:
                worker = await launcher.launch("m_0", needs=needs)
                await hello_of(worker)
            kept = worker.socket.dup()  # the worker does not see that its server is gone
            worker.socket.close()
            await until(lambda: agent.worker_count == 0)
            kept.close()

    run(main())


def test_files_come_once_to_a_host_and_are_checked(tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with agent_running(tmp_path / "c") as (_, address), launcher_to(address) as launcher:
            texts: list[str] = []
            for number in range(2):
                worker = await launcher.launch(f"m_{number}", needs=needs, pending=texts.append)
                copy = Path(worker.folder(needs.folder), "1", "weights")
                assert copy.read_bytes() == b"weights" * 1000
                worker.kill()
                await end_of(worker)
                worker.socket.close()
            assert [text for text in texts if not text.startswith("waiting")] == [
                "7000 bytes of its files are brought to the host",
                "",
                "",
            ]
            copy.chmod(0o600)
            copy.write_bytes(b"")
            with pytest.raises(Unavailable, match=r"the copy of 'm_2' in .* was changed"):
                await launcher.launch("m_2", needs=needs)
            assert launcher.owned() == []

    run(main())


def test_a_model_that_the_cache_cannot_hold_is_refused(tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with agent_running(tmp_path / "c", byte_size=6999) as (_, address), launcher_to(address) as launcher:
            with pytest.raises(Unavailable, match=r"have 7000 bytes, more than the cache .* --cache-byte-size"):
                await launcher.launch("m_0", needs=needs)

    run(main())


def test_files_with_another_content_than_their_digest_are_refused(tmp_path: Path, needs: WorkerNeeds) -> None:
    description = describe_launch(needs)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"garbage" * 1000)
        with pytest.raises(Unavailable, match="'1/weights' has another digest"):
            ModelCopies(tmp_path / "c", 1 << 20).take(theirs, "m_0", 1, description, lambda _: None)
        assert ours.recv(2) == b"+!"
    assert not [path for path in (tmp_path / "c").rglob("*") if path.is_dir()]


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (WorkerNeeds(gpu=True), "starts workers of KIND_CPU only"),
        (WorkerNeeds(worker="shared"), "starts no worker that models share .naiad.worker 'shared'"),
    ],
)
def test_what_an_agent_cannot_start_is_refused_at_once(needs: WorkerNeeds, text: str) -> None:
    async def main() -> None:
        async with launcher_to() as launcher:
            with pytest.raises(Unsupported, match=text):
                await launcher.launch("m_0", needs=needs)

    run(main())


def test_without_the_token_nobody_may_use_an_agent(tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        settings = AgentSettings("far", b"the token of the agent")
        async with (
            agent_running(tmp_path / "c", settings) as (agent, address),
            launcher_to(address, token=b"another token, a wrong one") as launcher,
            waiting_launch(launcher, needs, "the agent has another token"),
        ):
            assert not agent.sessions

    run(main())


def test_another_version_is_refused_with_both(
    tmp_path: Path, needs: WorkerNeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "PROTOCOL", "15 of 0.0.9")

    async def main() -> None:
        async with (
            agent_running(tmp_path / "c") as (_, address),
            launcher_to(address) as launcher,
            waiting_launch(launcher, needs, "is of another version (15 of 0.0.9)"),
        ):
            pass

    run(main())


def test_an_impostor_in_place_of_an_agent_is_found_out() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            proving = asyncio.create_task(asyncio.to_thread(prove, ours, b"right", Purpose(bytes(16), 7)))
            with pytest.raises(NotAdmitted):
                await admit(theirs, b"wrong")
            theirs.shutdown(socket.SHUT_RDWR)
            with pytest.raises(NotAdmitted, match="the agent has another token"):
                await proving

    run(main())


def test_who_has_the_token_is_admitted_with_its_purpose() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            proving = asyncio.create_task(asyncio.to_thread(prove, ours, b"right", Purpose(b"s" * 16, 7)))
            assert await admit(theirs, b"right") == Purpose(b"s" * 16, 7)
            await proving

    run(main())


def test_a_peer_is_lost_after_two_seconds_of_silence_and_not_before() -> None:
    silence = Silence()
    assert [silence.beat() for _ in range(LOST_BEATS)] == [False] * LOST_BEATS
    silence.heard()
    assert [silence.beat() for _ in range(LOST_BEATS + 1)] == [False] * LOST_BEATS + [True]


def test_silent_connections_of_one_peer_keep_no_other_out() -> None:
    assert surplus_of(["a", "b", "b", "c"]) == 1
    assert surplus_of(["a", "a", "b", "b"]) == 0


def test_an_agent_takes_servers_however_many_connections_say_nothing(tmp_path: Path, needs: WorkerNeeds) -> None:
    async def main() -> None:
        async with agent_running(tmp_path / "c") as (_, address):
            silent = [socket.create_connection(address) for _ in range(MAX_UNPROVEN + 8)]
            try:
                async with launcher_to(address) as launcher:
                    worker = await launcher.launch("m_0", needs=needs)
                    worker.kill()
                    await end_of(worker)
                    worker.socket.close()
                # The oldest were ended: only so many are waited for.
                while await asyncio.to_thread(silent[0].recv, 1 << 10):
                    pass
            finally:
                for each in silent:
                    each.close()

    run(main())


def test_what_a_worker_has_sent_last_comes_before_its_end(needs: WorkerNeeds) -> None:
    """The agent says over another connection that the process has ended, which may be faster."""

    async def main() -> None:
        async with launcher_to(("127.0.0.1", 1)) as launcher:
            worker = RemoteProcess(launcher.agents[0], 1, "m_0", OutputLimits())
            ours, theirs = socket.socketpair()
            worker.socket.close()
            worker.socket = ours
            causes = list[str]()
            worker.on_lost(causes.append)
            worker.ended_after_data("exit code 0")  # looks at once
            assert not causes, "its connection has not ended"
            theirs.sendall(b"the last")
            theirs.close()
            await until(lambda: bool(causes))
            assert (causes, ours.recv(100)) == (["exit code 0, on host ''"], b"the last")
            ours.close()

    run(main())


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o600)
    with pytest.raises(InvalidArgument, match="must have at least 16 characters"):
        read_token(file)
    file.write_text(" 0123456789abcdef\n")
    assert read_token(file) == b"0123456789abcdef"
    file.chmod(0o640)
    with pytest.raises(InvalidArgument, match="others may read the token file"):
        read_token(file)
