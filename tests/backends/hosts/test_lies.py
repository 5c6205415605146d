"""Agents and servers that say what is not true: nothing waits without end, and nothing takes memory or disk for it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from backends.hosts.files import ModelCopies
from backends.hosts.link import MAX_FROM_AGENT, Link
from backends.hosts.messages import (
    Beat,
    Expected,
    LaunchWorker,
    NotStarted,
    Printed,
    ToAgent,
    Welcome,
    admit,
    to_agent_decoder,
)
from kernel.errors import ErrorCode, ServingError, Unavailable
from kernel.repository.described_files import DescribedFile, LaunchDescription, describe_launch, digest_of
from tests.backends.hosts.agent_lab import launcher_to, waiting_launch
from tests.backends.launch.started_workers import identity_model, run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from backends.hosts.messages import AgentMessage
    from kernel.repository.worker_needs import WorkerNeeds


@pytest.fixture
def needs(tmp_path: Path) -> WorkerNeeds:
    return identity_model(tmp_path / "models")


@contextlib.asynccontextmanager
async def agent_that_says(
    response: Callable[[LaunchWorker], list[AgentMessage]], max_workers: int = 0
) -> AsyncIterator[tuple[str, int]]:
    """An agent that has the token, and responds to launches with these messages; yields its address."""
    loop = asyncio.get_running_loop()
    links: list[Link[ToAgent]] = []

    async def accept(listener: socket.socket) -> None:
        while True:
            sock, _ = await loop.sock_accept(listener)
            sock.setblocking(False)
            await admit(sock, b"")
            links.append(link := Link(to_agent_decoder, Beat, lambda message: take(message), lambda _: None))
            await link.begin(sock)

    def take(message: ToAgent) -> None:
        if isinstance(message, LaunchWorker):
            for each in response(message):
                links[-1].send(each)
        elif not isinstance(message, Beat):
            links[-1].send(Welcome("far", max_workers, 0))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepting = asyncio.create_task(accept(listener))
        try:
            yield listener.getsockname()
        finally:
            accepting.cancel()
            await asyncio.wait([accepting])
            for link in links:
                link.end("the test is over")


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (
            lambda n: [NotStarted(n, "no such code", "lies")],
            "it sent an invalid message: 'no such code' is not a valid",
        ),
        (lambda n: [Expected(n), Printed(n, 20, "x" * MAX_FROM_AGENT)], "it sent an invalid message: a message of"),
        (lambda n: [NotStarted(n, ErrorCode.UNAVAILABLE.value, "there is no room", full=True)], "there is no room"),
    ],
    ids=["a code that does not exist", "a message that is too long", "no room without a limit"],
)
def test_a_launch_ends_whatever_its_agent_says(
    response: Callable[[int], list[AgentMessage]], text: str, needs: WorkerNeeds
) -> None:
    async def main() -> None:
        async with (
            agent_that_says(lambda message: response(message.worker)) as address,
            launcher_to(address) as launcher,
        ):
            with pytest.raises(ServingError) as caught:
                await launcher.launch("m_0", needs=needs)
            assert text in caught.value.message
            assert launcher.owned() == []

    run(main())


def test_a_launch_waits_for_an_agent_that_has_a_limit_and_no_room(needs: WorkerNeeds) -> None:
    async def main() -> None:
        def full(message: LaunchWorker) -> list[AgentMessage]:
            return [NotStarted(message.worker, ErrorCode.UNAVAILABLE.value, "full", full=True)]

        async with (
            agent_that_says(full, max_workers=1) as address,
            launcher_to(address) as launcher,
            waiting_launch(launcher, needs, "'far' has 1 of 1"),
        ):
            pass

    run(main())


def taken(copies: ModelCopies, description: LaunchDescription, content: bytes) -> tuple[str, bytes]:
    """Let a host take what a server sends; returns the error, and what the host has said."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(content) + (1 << 20))
        ours.sendall(content)
        try:
            copies.take(theirs, "m_0", 1, description, lambda _: None).release()
        except Unavailable as error:
            return error.message, ours.recv(1 << 16)
        return "", ours.recv(1 << 16)


def test_a_disk_that_is_full_refuses_the_model_and_leaves_nothing(tmp_path: Path, needs: WorkerNeeds) -> None:
    copies, description = ModelCopies(tmp_path / "c", 1 << 20), describe_launch(needs)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # a file that grows fails as on a full disk
    try:
        error, said = taken(copies, description, b"weights" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "could not be brought to this host" in error
    assert said.startswith(b"+!")
    assert not [path for path in (tmp_path / "c").rglob("*") if path.is_dir()]
    assert taken(copies, description, b"weights" * 1000) == ("", b"+.")


def test_sizes_below_zero_do_not_make_room_for_others(tmp_path: Path) -> None:
    files = (DescribedFile("1/a", 1 << 40, "0" * 64), DescribedFile("1/b", 1 - (1 << 40), "0" * 64))
    copies = ModelCopies(tmp_path / "c", 1 << 20)
    error, said = taken(copies, LaunchDescription(files, digest_of(files)), b"x")
    assert "'1/b' has a size below zero" in error
    assert said.startswith(b"!")


@pytest.mark.parametrize("name", ["../a", "/a", "1/../../a"])
def test_names_that_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    files = (DescribedFile(name, 1, "0" * 64),)
    error, said = taken(ModelCopies(tmp_path / "c", 1 << 20), LaunchDescription(files, digest_of(files)), b"x")
    assert f"'{name}' is no name of a file in a model's folder" in error
    assert said.startswith(b"+!")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_a_digest_of_other_files_is_refused(tmp_path: Path, needs: WorkerNeeds) -> None:
    """Else the copy of one model could be stored under the digest of another one, which all servers would get."""
    description = describe_launch(needs)
    changed = msgspec.structs.replace(description, files=(DescribedFile("1/weights", 1, "0" * 64),))
    copies = ModelCopies(tmp_path / "c", 1 << 20)
    assert taken(copies, description, b"weights" * 1000) == ("", b"+.")
    error, said = taken(copies, changed, b"x")
    assert "is not that of their descriptions" in error
    assert said.startswith(b"!")
