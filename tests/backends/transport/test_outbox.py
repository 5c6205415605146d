"""What a worker keeps, the kernel reads: exactly once, whenever it looks and whatever was sent meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.transport import wire
from backends.transport.channel import BlockingChannel, LoopChannel
from backends.transport.outbox import BYTE_SIZE, IN_MODEL, Outbox, OutboxReader, Progress
from shm.region import NotSealedMemory


def test_what_is_kept_is_read_from_any_position() -> None:
    outbox = Outbox()
    reader = OutboxReader(outbox.fd)
    assert reader.unsent(0) == b""
    outbox.sent(10)
    assert outbox.add(b"abc")
    assert outbox.add(b"def")
    assert reader.unsent(10) == b"abcdef"
    assert reader.unsent(13) == b"def"
    assert reader.unsent(16) == b""
    assert reader.unsent(9) == b"", "what is before it has not arrived yet"
    sent: list[bytes] = []
    outbox.send_with(lambda data: sent.append(bytes(data)))
    outbox.send_with(lambda data: sent.append(bytes(data)))
    assert sent == [b"abcdef"], "what was sent is not kept any more"
    assert reader.unsent(10) == b""
    assert outbox.add(b"ghi")
    assert reader.unsent(16) == b"ghi"
    os.close(outbox.fd)


def test_what_does_not_fit_is_not_kept() -> None:
    outbox = Outbox()
    assert not outbox.add(bytes(BYTE_SIZE))
    assert OutboxReader(outbox.fd).unsent(0) == b""
    os.close(outbox.fd)


def test_the_kernel_sees_how_far_the_worker_is_at_any_time() -> None:
    outbox = Outbox()
    reader = OutboxReader(outbox.fd)
    os.close(outbox.fd)
    assert reader.progress() == Progress(0, False)
    outbox.progress[0] = 7 << 1
    assert reader.progress() == Progress(7, False)
    outbox.progress[0] |= IN_MODEL
    assert reader.progress() == Progress(7, True)
    assert outbox.add(b"abc")
    outbox.sent(3)
    assert (reader.progress(), reader.unsent(3)) == (Progress(7, True), b"")


def test_no_process_can_shorten_an_outbox() -> None:
    outbox = Outbox()
    with pytest.raises(PermissionError):
        os.ftruncate(outbox.fd, 0)
    os.close(outbox.fd)


def test_memory_that_could_be_shortened_is_no_outbox() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, BYTE_SIZE)
    with pytest.raises(NotSealedMemory):
        OutboxReader(fd)
    os.close(fd)


@given(
    st.lists(st.tuples(st.sampled_from(["keep", "send", "flush", "look", "read"]), st.integers(1, 3000)), max_size=40)
)
def test_every_message_is_taken_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    """The kernel looks at any time, also between a send and its arrival, and after the worker's death."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        taken: list[wire.ToKernel] = []

        def take(raw_messages: list[bytes]) -> None:
            for raw in raw_messages:
                message = wire.to_kernel_decoder.decode(raw)
                if isinstance(message, wire.OutboxCreated):
                    fd = channel.take_fd()
                    channel.attach_outbox(fd)
                    os.close(fd)
                else:
                    taken.append(message)

        channel = LoopChannel(ours, take, lambda cause: None)
        worker = BlockingChannel(theirs)
        said: list[wire.ToKernel] = [wire.Hello(wire.PROTOCOL, 1)]
        worker.send(said[0])
        worker.share_outbox()
        channel.read_rest()
        for number, (step, size) in enumerate(steps):
            if step in ("keep", "send"):
                said.append(wire.Log("INFO", f"{number} " + "x" * size))
                (worker.send_later if step == "keep" else worker.send)(said[-1])
            elif step == "flush":
                worker.flush()
            elif step == "look":
                channel.take_unsent()
            else:
                channel.read_rest()
            assert taken == said[: len(taken)]
        worker.close()  # as by SIGKILL: nothing more is sent
        channel.read_rest()
        channel.take_unsent()
        assert taken == said
        channel.close()

    asyncio.run(main())
