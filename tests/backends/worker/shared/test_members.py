"""Models come to a process and leave it, each on a connection of its own."""

from __future__ import annotations

import queue
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.worker.loop import Worker
from backends.worker.shared.members import Members

if TYPE_CHECKING:
    from backends.worker.shared.turn import Turn


class BrokenMember:
    """A model whose worker fails."""

    closed = False

    def run(self) -> None:
        raise KeyError(7)

    def close(self) -> None:
        self.closed = True

    def enter_turn(self) -> None: ...

    def leave_turn(self) -> None: ...


def connection() -> tuple[socket.socket, int]:
    ours, theirs = socket.socketpair()
    return ours, theirs.detach()


def test_a_worker_that_fails_is_told_to_the_kernel(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[wire.ToKernel] = []
    ended, member = threading.Event(), BrokenMember()

    def send(message: wire.ToKernel) -> None:
        sent.append(message)
        ended.set()

    ours, fd = connection()
    with ours:
        Members(send, lambda channel, turn: member).add(wire.AddMember(5, "a"), lambda: fd)
        assert ended.wait(30)
    assert sent == [wire.MemberEnded(5, "KeyError: 7")]
    assert member.closed
    assert "the worker of a model failed" in caplog.text


def test_a_backend_that_cannot_share_a_worker_refuses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.builtin.identity.IdentityBackend.shares_worker", False)
    ended = threading.Event()

    def new_member(channel: BlockingChannel, turn: Turn) -> Worker:
        return Worker(channel, local=False, turn=turn)

    ours, fd = connection()
    with ours:
        Members(lambda message: ended.set(), new_member).add(wire.AddMember(1, "m"), lambda: fd)
        channel = BlockingChannel(ours.dup())
        channel.send(wire.Complete('{"name": "m", "backend": "identity"}', "/m", 1))
        found: list[wire.ToKernel] = []
        while len(found) < 2:
            found += [wire.to_kernel_decoder.decode(raw) for raw in channel.receive() or ()]
        channel.send(wire.Stop())
        assert ended.wait(30)
        channel.close()
    assert isinstance(found[0], wire.Hello)
    assert found[1] == wire.LoadFailed(
        "unsupported",
        "model 'm' cannot share a worker (parameter naiad.worker): its backend 'identity' does not support it",
    )


def test_a_process_on_another_host_opens_the_connection_of_a_model_and_sends_its_token() -> None:
    ended = threading.Event()

    def new_member(channel: BlockingChannel, turn: Turn) -> Worker:
        return Worker(channel, local=False, turn=turn)

    def no_descriptor() -> int:
        raise AssertionError("nobody passes descriptors between hosts")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        message = wire.AddMember(3, "m", address, b"t" * 16)
        Members(lambda message: ended.set(), new_member).add(message, no_descriptor)
        listener.settimeout(30)
        sock, _ = listener.accept()
    sock.settimeout(30)
    assert sock.recv(16, socket.MSG_WAITALL) == b"t" * 16
    channel = BlockingChannel(sock)
    [raw] = channel.receive() or [b""]
    hello = wire.to_kernel_decoder.decode(raw)
    assert isinstance(hello, wire.Hello)
    assert not hello.local
    channel.send(wire.Stop())
    assert ended.wait(30)
    channel.close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere"])
def test_a_connection_that_cannot_be_opened_is_told_to_the_kernel(address: str) -> None:
    sent: queue.SimpleQueue[wire.ToKernel] = queue.SimpleQueue()

    def new_member(channel: BlockingChannel, turn: Turn) -> Worker:
        raise AssertionError("there is no connection")

    Members(sent.put, new_member).add(wire.AddMember(3, "m", address), lambda: -1)
    ended = sent.get(timeout=30)
    assert isinstance(ended, wire.MemberEnded)
    assert ended.member == 3
    assert ended.failure.startswith(f"it cannot connect to {address}: ")
