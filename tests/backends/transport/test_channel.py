"""The two ends of a channel: order, descriptors, broken peers."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

import pytest

from backends.transport import wire
from backends.transport.channel import BlockingChannel, LoopChannel
from backends.transport.framing import frame


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
    ("data", "problem"), [(b"\xff\xff\xff\xff", "invalid message"), (frame(b"\xc1"), "invalid message"), (b"", None)]
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
