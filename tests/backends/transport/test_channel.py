"""The two ends of a channel: order, descriptors, broken peers.

A process that a model forks leaves the connection of its worker to its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading

import pytest

from backends.transport import wire
from backends.transport.channel import BlockingChannel, DescriptorLost, LoopChannel
from backends.transport.framing import LENGTH, MAX_WORKER_FRAME, FrameTooLarge, frame
from kernel.loop.iteration_end import IterationEnd
from tests.open_descriptors import open_descriptors


def test_descriptors_arrive_with_their_message_and_in_order_with_the_others() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel = LoopChannel(ours, lambda _: None, lambda _: None)
        worker = BlockingChannel(theirs)
        fd = os.memfd_create("sent")
        os.write(fd, b"hello")
        channel.send(wire.Detach(1))
        channel.send_with_fd(wire.Attach(2, 5), fd)
        channel.send(wire.Detach(3))
        await asyncio.sleep(0)
        os.close(fd)
        found: list[wire.ToWorker] = []
        while len(found) < 3:
            found += [wire.to_worker_decoder.decode(raw) for raw in worker.receive() or []]
        assert found == [wire.Detach(1), wire.Attach(2, 5), wire.Detach(3)]
        received = worker.take_fd()
        assert os.pread(received, 5, 0) == b"hello"
        os.close(received)
        channel.close()
        worker.close()

    asyncio.run(main())


def test_responses_to_messages_that_came_together_may_be_joined() -> None:
    async def main() -> None:
        iteration_end = IterationEnd.current()
        ours, theirs = socket.socketpair()
        seen: list[tuple[int, bool]] = []
        channel = LoopChannel(
            ours, lambda messages: seen.append((len(messages), iteration_end.joins_writes)), lambda _: None
        )
        for count in (1, 2, 1):
            theirs.sendall(frame(wire.encoder.encode(wire.Joined())) * count)
            channel.read_rest()
            assert not iteration_end.joins_writes
        assert seen == [(1, False), (2, True), (1, False)]
        channel.close()
        theirs.close()

    asyncio.run(main())


def test_the_end_of_a_worker_can_be_made_before_its_connection() -> None:
    ours, theirs = socket.socketpair()
    worker = BlockingChannel()
    worker.connect(theirs)
    ours.sendall(frame(wire.encoder.encode(wire.Detach(1))))
    assert worker.poll(0)
    assert [wire.to_worker_decoder.decode(raw) for raw in worker.receive() or []] == [wire.Detach(1)]
    worker.send(wire.Joined())
    assert LENGTH.unpack(ours.recv(LENGTH.size))[0] > 0
    worker.close()
    ours.close()


def test_messages_larger_than_the_socket_buffer_arrive_whole() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        worker = BlockingChannel(theirs)
        channel = LoopChannel(ours, lambda _: None, lambda _: None)
        sent = [wire.Load("x" * 3_000_000, "", number, "") for number in range(3)]
        found: list[wire.ToWorker] = []

        def receive() -> None:
            while len(found) < 3:
                found.extend(wire.to_worker_decoder.decode(raw) for raw in worker.receive() or [])

        reader = threading.Thread(target=receive)
        reader.start()
        for message in sent:
            channel.send(message)
        await asyncio.to_thread(reader.join)
        assert found == sent
        channel.close()
        worker.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\xff\xff\xff\xff", "invalid message"),
        (LENGTH.pack(MAX_WORKER_FRAME + 1), "a message of 16777217 bytes, the largest has 16777216"),
        (frame(b"\xc1"), "invalid message"),
        (b"", None),
    ],
)
def test_a_peer_that_sends_garbage_or_ends_is_reported_once(data: bytes, problem: str | None) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        def decode(messages: list[bytes]) -> None:
            for raw in messages:
                wire.to_kernel_decoder.decode(raw)

        LoopChannel(ours, decode, ended.set_result)
        theirs.sendall(data) if data else theirs.close()
        found = await ended
        assert found is None if problem is None else problem in (found or "")
        theirs.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "error", [KeyError("k"), AssertionError("no"), IndexError(), OSError(9, "bad"), TypeError("t")]
)
def test_whatever_goes_wrong_with_a_message_ends_the_connection(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        handled: list[bytes] = []

        def fail(messages: list[bytes]) -> None:
            handled.extend(messages)
            raise error

        channel = LoopChannel(ours, fail, ended.set_result)
        theirs.sendall(frame(b"first"))
        problem = await ended
        assert problem == f"a message of it could not be handled: {type(error).__name__}: {error}"
        channel.take_unsent()
        assert handled == [b"first"]
        theirs.close()

    asyncio.run(main())
    assert "could not be handled" in caplog.text
    assert type(error).__name__ in caplog.text, "the log has the traceback"


def test_a_message_of_which_only_a_part_came_is_known_by_its_place_in_the_stream() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel = LoopChannel(ours, lambda _: None, lambda _: None)
        assert channel.incomplete_since is None
        whole = frame(b"x" * 100)
        for sent, since in (
            (whole[:2], 0),
            (whole[2:60], 0),
            (whole[60:] + whole + whole[:50], 208),
            (whole[50:], None),
        ):
            theirs.sendall(sent)
            channel.read_rest()
            assert channel.incomplete_since == since
        channel.close()
        theirs.close()

    asyncio.run(main())


def test_descriptors_that_no_message_takes_end_the_connection() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        problems: list[str | None] = []
        channel = LoopChannel(ours, lambda _: None, problems.append)
        before = open_descriptors()
        for _ in range(5):
            socket.send_fds(theirs, [frame(b"x")], [0])
        channel.read_rest()
        assert problems == ["it sent an invalid message: 5 file descriptors without their messages"]
        assert open_descriptors() < before, "none is left open"
        theirs.close()

    asyncio.run(main())


def test_texts_that_no_encoding_has_are_escaped_in_both_directions() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        received: list[wire.ToKernel] = []
        channel = LoopChannel(
            ours, lambda raw: received.extend(map(wire.to_kernel_decoder.decode, raw)), lambda _: None
        )
        worker = BlockingChannel(theirs)
        worker.send(wire.Log("INFO", "file\udcff"))
        channel.read_rest()
        assert received == [wire.Log("INFO", "file\\udcff")]
        channel.send(wire.Detach(1))
        channel.send(wire.Complete("{}", "/models/\udcff", 1))
        channel.send(wire.Detach(2))
        channel.flush()
        sent = [wire.to_worker_decoder.decode(raw) for raw in worker.receive() or []]
        assert sent == [wire.Detach(1), wire.Complete("{}", "/models/\\udcff", 1), wire.Detach(2)]
        channel.close()
        worker.close()

    asyncio.run(main())


def test_a_message_that_cannot_be_encoded_spoils_no_other() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel, worker = LoopChannel(ours, lambda _: None, lambda _: None), BlockingChannel(theirs)
        for message in (wire.Detach(1), wire.Detach(1 << 70), wire.Detach(2)):
            with contextlib.suppress(OverflowError):
                channel.send(message)
        channel.flush()
        assert [wire.to_worker_decoder.decode(raw) for raw in worker.receive() or []] == [
            wire.Detach(1),
            wire.Detach(2),
        ]
        channel.close()
        worker.close()

    asyncio.run(main())


def test_a_message_longer_than_a_worker_may_send_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    worker = BlockingChannel(theirs)
    with pytest.raises(FrameTooLarge, match=r"a message of \d+ bytes, the largest has 16777216"):
        worker.send(wire.Log("INFO", "x" * MAX_WORKER_FRAME))
    worker.send(wire.Log("INFO", "short"))
    assert ours.recv(1 << 16) == frame(wire.encoder.encode(wire.Log("INFO", "short")))
    ours.close()
    worker.close()


def test_a_worker_that_has_waited_for_a_while_notices_it_and_receives_the_next_message_all_the_same() -> None:
    ours, theirs = socket.socketpair()
    worker = BlockingChannel(theirs)
    idle: list[bool] = []
    worker.watch_idle(0.001, lambda: idle.append(True))
    assert worker.receive() == []
    assert worker.receive(wait=False) == []
    assert idle == [True]
    ours.send(frame(b"message"))
    assert worker.receive() == [b"message"]
    worker.close()
    ours.close()


#: A worker whose connection is standard input. Its child reads and sends, and writes what it gets.
FORKS = """
import os, socket, sys
from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.transport.channel import leave_to_parent

connection = socket.socket(fileno=os.dup(0))
worker = BlockingChannel(connection)
leave_to_parent(worker, connection)
child = os.fork()
if not child:
    print("child reads", worker.receive())
    try:
        worker.send(wire.Detach(1))
    except BrokenPipeError:
        print("child sends to nobody", flush=True)
    worker.close()
    os._exit(0)
os.waitpid(child, 0)
worker.send(wire.Detach(7))
"""


def test_a_child_neither_speaks_for_its_parent_nor_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = subprocess.run(
            [sys.executable, "-c", FORKS], stdin=theirs.fileno(), capture_output=True, text=True, timeout=50, check=True
        )
        assert found.stdout == "child reads None\nchild sends to nobody\n"
        assert b"Detach" in ours.recv(1000)
        theirs.shutdown(socket.SHUT_RDWR)
        assert ours.recv(1000) == b""


def test_a_descriptor_for_which_no_number_is_left_fails_its_own_message_and_no_later_one() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        found: list[int | None] = []

        def take(raw: list[bytes]) -> None:
            for _ in raw:
                try:
                    found.append(channel.take_fd())
                except DescriptorLost:
                    found.append(None)

        channel = LoopChannel(ours, take, lambda _: None)
        held = resource.getrlimit(resource.RLIMIT_NOFILE)
        socket.send_fds(theirs, [frame(b"x")], [0])
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, held[1]))
        try:
            channel.read_rest()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, held)
        socket.send_fds(theirs, [frame(b"y")], [0])
        channel.read_rest()
        lost, fd = found
        assert lost is None
        assert fd is not None
        os.close(fd)
        channel.close()
        theirs.close()

    asyncio.run(main())
