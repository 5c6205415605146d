"""Arenas of workers on devices, as the kernel knows them: whose they are, who opens them, and when blocks are free."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from backends.supervision.worker_memory import WorkerMemory
from backends.transport import wire
from kernel.errors import Unavailable
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from shm.lease import RegionNumber
from shm.tensor import RequestedOutput, Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.supervision.session import WorkerSession

HANDLE = bytes(range(64))


class Session:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[wire.ToWorker] = []

    def send(self, message: wire.ToWorker) -> None:
        self.sent.append(message)

    def memory(self, title: str) -> WorkerMemory:
        return WorkerMemory(cast("WorkerSession", self), title)


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def memory(session: Session) -> Iterator[WorkerMemory]:
    """The memory of a worker with an arena on GPU 1."""
    made = session.memory("m_0")
    made.take_device_arena(wire.DeviceArenaCreated(-1, 1 << 21, 1, HANDLE))
    yield made
    made.close()
    assert all(arena.region.closed for arena in made.device_arenas.values()), "every lease of a test is released"


def named(arena: int, offset: int, byte_size: int = 4096) -> Span:
    return Span(RegionNumber(arena), offset, byte_size)


def request(*outputs: RequestedOutput) -> Request:
    return Request("m", [], RecordingSink(), outputs=list(outputs))


def output(memory: WorkerMemory, offset: int = 8192, *, on_device: bool = True) -> Span:
    """Return the place of an output that the worker has left on its device."""
    tensor = Tensor("OUT", "UINT8", [4096], span=named(-1, offset))
    assert tensor.span is not None
    memory.take_output(request(RequestedOutput("OUT", on_device=on_device)), tensor, tensor.span, final=True)
    return tensor.span


async def end_of_iteration() -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    "message",
    [
        wire.DeviceArenaCreated(-1, 1 << 21, 1, HANDLE),
        wire.DeviceArenaCreated(0, 1 << 21, 1, HANDLE),
        wire.DeviceArenaCreated(-2, 1 << 21, 1, b"short"),
    ],
    ids=["known", "not below 0", "no handle"],
)
def test_an_arena_that_no_worker_of_ours_has_is_refused(memory: WorkerMemory, message: wire.DeviceArenaCreated) -> None:
    with pytest.raises(ValueError, match="an arena .* on a device"):
        memory.take_device_arena(message)


def test_an_output_on_a_device_must_have_been_asked_for_there(memory: WorkerMemory) -> None:
    with pytest.raises(ValueError, match="output 'OUT' on a device, where it was not asked for"):
        output(memory, on_device=False)


def test_a_span_in_an_unknown_arena_is_refused(memory: WorkerMemory) -> None:
    with pytest.raises(ValueError, match="was not created"):
        memory.own_span(named(-2, 0))
    with pytest.raises(ValueError, match="outside of the worker's arena"):
        memory.own_span(named(-1, 1 << 21))


def test_blocks_are_freed_in_their_arenas_after_the_last_lease(session: Session, memory: WorkerMemory) -> None:
    memory.take_device_arena(wire.DeviceArenaCreated(-2, 1 << 22, 1, HANDLE))

    async def scenario() -> None:
        first, second = output(memory), memory.own_span(named(-2, 4096))
        shared = first.shared()
        first.lease.release()
        second.lease.release()
        await end_of_iteration()
        assert session.sent == [wire.FreeBlocks([4096], -2)]
        shared.lease.release()
        await end_of_iteration()
        assert session.sent[1:] == [wire.FreeBlocks([8192], -1)]

    asyncio.run(scenario())


def test_another_worker_gets_the_handle_once_and_the_worker_itself_gets_none(
    session: Session, memory: WorkerMemory
) -> None:
    async def scenario() -> None:
        span = output(memory)
        region = span.lease.region
        other = Session()
        others = other.memory("n_0")
        for _ in range(2):
            others.attach(region, writable=False)
            memory.attach(region, writable=False)
        assert other.sent == [wire.AttachDevice(region.number, 1 << 21, 1, HANDLE, of_worker=True)]
        assert session.sent == [wire.OwnArena(region.number, -1)]
        span.lease.release()
        others.close()

    asyncio.run(scenario())


def test_memory_that_went_with_its_worker_is_refused_and_detached_when_nothing_holds_it(
    session: Session, memory: WorkerMemory
) -> None:
    async def scenario() -> None:
        span = output(memory)
        region = span.lease.region
        other = Session()
        others = other.memory("n_0")
        others.attach(region, writable=False)
        memory.close()
        text = "a tensor on GPU 1 is gone with the worker that had it: outputs of m_0"
        for each in (others, other.memory("new")):
            with pytest.raises(Unavailable, match=text):
                each.attach(region, writable=False)
        assert len(other.sent) == 1
        span.lease.release()
        assert other.sent[1:] == [wire.Detach(region.number)]
        assert region.closed

    asyncio.run(scenario())
