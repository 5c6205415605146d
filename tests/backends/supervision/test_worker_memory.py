"""Memory that the kernel shares with a worker: who may write to it, whose it is, and when it is free again.

One file for one class: its tests share the worker that is played below.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections import deque
from typing import TYPE_CHECKING, cast

import pytest

from backends.supervision.worker_memory import OutputArena, WorkerMemory
from backends.transport import wire
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from shm.arena import Arena
from shm.blocks import ByteBudget
from shm.lease import RegionNumber
from shm.region import FileHandle, Region, RegionKind
from shm.tensor import RequestedOutput, Span, Tensor
from tests.open_descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from backends.supervision.session import WorkerSession

CAPACITY = 1 << 16


class RecordingSession:
    """A session that keeps what is sent, and how far a descriptor that was sent along may be used."""

    def __init__(self) -> None:
        self.sent: list[wire.ToWorker] = []
        self.access: list[int] = []
        self.received_fds: deque[int] = deque()

    def send(self, message: wire.ToWorker) -> None:
        self.sent.append(message)

    def send_with_fd(self, message: wire.ToWorker, fd: int) -> None:
        self.sent.append(message)
        self.access.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)

    def take_fd(self) -> int:
        return self.received_fds.popleft()


class Bench:
    """The memory of a worker, whose own arena the test plays, and an arena of the kernel."""

    def __init__(self) -> None:
        self.session = RecordingSession()
        self.budget = ByteBudget(1)
        self.memory = WorkerMemory(cast("WorkerSession", self.session), "m_0", self.budget)
        self.workers_arena = Arena("outputs", CAPACITY)
        self.kernels_arena = Arena("inputs", CAPACITY)
        fd = os.memfd_create("client")
        os.ftruncate(fd, 4096)
        self.clients_region = Region("r", RegionKind.SYSTEM, FileHandle(fd), 4096)

    def announce_arena(self) -> OutputArena:
        """Let the worker have created its arena."""
        self.session.received_fds.append(os.dup(self.workers_arena.region.fd))
        self.memory.take_output_arena(CAPACITY)
        assert self.memory.output_arena is not None
        return self.memory.output_arena

    def write(self, content: bytes) -> int:
        """Let the worker write an output to a block of its arena; returns where."""
        block = self.workers_arena.take(len(content))
        assert block is not None
        block.view()[:] = content
        return block.offset

    def input(self, byte_size: int = 8192) -> Tensor:
        block = self.kernels_arena.take(byte_size)
        assert block is not None
        return Tensor("IN", "UINT8", [byte_size], span=block.span)

    def input_of_client(self, byte_size: int = 4096) -> Tensor:
        return Tensor("IN", "UINT8", [byte_size], span=Span(self.clients_region.lease(), 0, byte_size))

    @property
    def blocks_of_kernel(self) -> int:
        return self.kernels_arena.allocator.block_count

    def close(self) -> None:
        self.memory.close()
        self.workers_arena.close()
        self.kernels_arena.close()
        self.clients_region.drop()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()
    assert made.clients_region.closed, "every lease of a test is released"
    assert made.budget.used_byte_size == 0


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run `scenario` on an event loop."""

    async def main() -> None:
        await scenario()

    asyncio.run(main())


async def end_of_iteration() -> None:
    """What is done at the end of this event-loop iteration is done then."""
    await asyncio.sleep(0)


def request(*inputs: Tensor, outputs: tuple[RequestedOutput, ...] = ()) -> Request:
    return Request("m", list(inputs), RecordingSink(), outputs=list(outputs), leased=True)


def named(region: int, offset: int, byte_size: int) -> Span:
    """Return a span as a message of the worker names it."""
    return Span(RegionNumber(region), offset, byte_size)


def taken(bench: Bench, asked: Request, name: str, span: Span, *, final: bool = True) -> Span:
    """Return the place that an output gets, which the worker left in `span`."""
    output = Tensor(name, "UINT8", [span.byte_size], span=span)
    bench.memory.take_output(asked, output, span, final=final)
    assert output.span is not None
    return output.span


# ---- regions that the worker knows ----------------------------------------------------------


def test_a_worker_may_write_to_what_it_is_given_for_writing_and_reads_the_rest(bench: Bench) -> None:
    other = Arena("outputs of another worker", CAPACITY)
    kernels, theirs, clients = bench.kernels_arena.region, other.region, bench.clients_region
    bench.memory.attach(kernels, writable=True)
    bench.memory.attach(theirs, writable=False)
    bench.memory.attach(clients, writable=True)
    assert bench.session.sent == [
        wire.Attach(kernels.number, CAPACITY, 0, True, False),
        wire.Attach(theirs.number, CAPACITY, 0, False, False),
        wire.Attach(clients.number, 4096, 0, True, True),
    ]
    assert bench.session.access == [os.O_RDWR, os.O_RDONLY, os.O_RDWR]
    other.close()


def test_a_worker_that_pins_knows_which_pages_of_its_inputs_stay(bench: Bench) -> None:
    other = Arena("outputs of another worker", CAPACITY)
    kernels = bench.kernels_arena.region
    bench.memory.steady_byte_size = 8192
    bench.memory.attach(kernels, writable=True)
    bench.memory.attach(other.region, writable=False)
    bench.memory.attach(bench.clients_region, writable=True)
    assert [m.steady_byte_size for m in bench.session.sent if isinstance(m, wire.Attach)] == [8192, 0, 0]
    assert (kernels.steady_byte_size, other.region.steady_byte_size) == (8192, 0)
    other.close()


def test_a_region_is_attached_once_and_detached_when_it_is_closed(bench: Bench) -> None:
    region = Region("s", RegionKind.SYSTEM, FileHandle(os.memfd_create("s")), 64)
    lease = region.lease()
    bench.memory.attach(region, writable=True)
    bench.memory.attach(region, writable=True)
    assert len(bench.session.sent) == 1
    region.drop()
    assert len(bench.session.sent) == 1, "it is in use"
    lease.release()
    assert bench.session.sent[1:] == [wire.Detach(region.number)]


def test_a_region_of_a_client_that_must_not_be_mapped_any_more_is_attached_again(bench: Bench) -> None:
    region = bench.clients_region
    bench.memory.attach(region, writable=True)
    assert list(bench.memory.mapped_client_regions) == [region.number]
    region.copy_from_now_on()
    region.copy_from_now_on()
    assert bench.session.sent[1:] == [wire.Attach(region.number, 4096, 0, True, True, True)]
    assert bench.memory.mapped_client_regions == {}
    assert region.number in bench.memory.attached


def fail_without_descriptors(message: wire.ToWorker, fd: int) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_without_a_descriptor_a_region_is_attached_again_when_the_next_request_uses_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = bench.clients_region
    bench.memory.attach(region, writable=True)
    with monkeypatch.context() as patch:
        patch.setattr(bench.session, "send_with_fd", fail_without_descriptors)
        region.copy_from_now_on()
        with pytest.raises(OSError, match="Too many open files"):
            bench.memory.attach(region, writable=True)
    assert list(bench.memory.mapped_client_regions) == [region.number], "the worker has the mapping still"
    bench.memory.attach(region, writable=True)
    assert bench.session.sent[1:] == [wire.Attach(region.number, 4096, 0, True, True, True)]
    assert bench.memory.mapped_client_regions == {}
    region.drop()
    assert bench.session.sent[2:] == [wire.Detach(region.number)]


def test_a_region_that_could_not_be_attached_again_is_detached_when_it_is_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.memory.attach(bench.clients_region, writable=True)
    monkeypatch.setattr(bench.session, "send_with_fd", fail_without_descriptors)
    bench.clients_region.copy_from_now_on()
    bench.clients_region.drop()
    assert bench.session.sent[1:] == [wire.Detach(bench.clients_region.number)]


def test_a_new_worker_never_maps_a_region_that_is_copied(bench: Bench) -> None:
    bench.clients_region.copy_from_now_on()
    bench.memory.attach(bench.clients_region, writable=True)
    assert bench.session.sent == [wire.Attach(bench.clients_region.number, 4096, 0, True, True, True)]
    assert bench.memory.mapped_client_regions == {}


def test_the_regions_that_a_worker_had_mapped_are_reported_with_those_that_requests_used(bench: Bench) -> None:
    reported: list[tuple[list[Region], list[Region]]] = []
    idle = Region("idle", RegionKind.SYSTEM, FileHandle(os.memfd_create("idle")), 64)
    for region in (idle, bench.clients_region):
        region.on_fault = lambda mapped, used: reported.append((list(mapped), list(used)))
        bench.memory.attach(region, writable=True)
    bench.memory.attach(bench.kernels_arena.region, writable=True)
    span = Span(bench.clients_region.lease(), 0, 8)
    bench.memory.report_fault([Request("m", [], RecordingSink(), outputs=[RequestedOutput("OUT", span=span)])])
    assert reported == [([idle, bench.clients_region], [bench.clients_region])]
    span.lease.release()
    idle.drop()
    assert list(bench.memory.mapped_client_regions) == [bench.clients_region.number], "it is closed"


def test_a_worker_that_is_gone_is_sent_nothing(bench: Bench) -> None:
    region = Region("s", RegionKind.SYSTEM, FileHandle(os.memfd_create("s")), 64)
    bench.memory.attach(region, writable=True)
    bench.memory.close()
    region.drop()
    assert len(bench.session.sent) == 1


def test_a_worker_is_given_its_own_arena_without_a_descriptor(bench: Bench) -> None:
    region = bench.announce_arena().region
    bench.memory.attach(region, writable=False)
    assert bench.session.sent == [wire.OwnArena(region.number)]
    assert bench.session.access == []


# ---- the worker's arena ---------------------------------------------------------------------


def test_an_arena_that_could_shrink_or_is_shorter_than_announced_is_refused(bench: Bench) -> None:
    unsealed = os.memfd_create("test")
    os.ftruncate(unsealed, CAPACITY)
    for fd, byte_size in ((unsealed, CAPACITY), (os.dup(bench.workers_arena.region.fd), CAPACITY + 1)):
        bench.session.received_fds.append(fd)
        with pytest.raises(ValueError, match="a memfd"):
            bench.memory.take_output_arena(byte_size)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert bench.memory.output_arena is None


def test_a_second_arena_is_refused(bench: Bench) -> None:
    arena = bench.announce_arena()
    second = os.dup(bench.workers_arena.region.fd)
    bench.session.received_fds.append(second)
    with pytest.raises(ValueError, match="a second output arena"):
        bench.memory.take_output_arena(CAPACITY)
    assert bench.memory.output_arena is arena
    assert second not in open_descriptors()


def test_a_block_is_free_when_the_last_lease_of_any_of_its_tensors_is_released(bench: Bench) -> None:
    async def scenario() -> None:
        arena = bench.announce_arena()
        offset = bench.write(b"x" * 5000)
        spans = [taken(bench, request(), name, named(0, offset, 5000)) for name in "AB"]
        consumer = spans[0].shared()
        assert arena.leased_block_count == 1
        assert bench.budget.used_byte_size == 5000, "once, and more than the limit"
        for span in spans:
            assert bytes(span.lease.region.view(span.offset, span.byte_size)) == b"x" * 5000
            span.lease.release()
        await end_of_iteration()
        assert (arena.leased_block_count, bench.session.sent) == (1, [])
        consumer.lease.release()
        assert (arena.leased_block_count, bench.session.sent) == (0, [])
        await end_of_iteration()
        assert bench.session.sent == [wire.FreeBlocks([offset])]

    run(scenario)


def test_blocks_that_are_free_in_one_event_loop_iteration_are_named_in_one_message(bench: Bench) -> None:
    async def scenario() -> None:
        bench.announce_arena()
        offsets = [bench.write(b"x" * 5000) for _ in range(3)]
        spans = [taken(bench, request(), "A", named(0, offset, 5000)) for offset in offsets]
        for span in spans[:2]:
            span.lease.release()
        await end_of_iteration()
        assert bench.session.sent == [wire.FreeBlocks(offsets[:2])]
        spans[2].lease.release()
        await end_of_iteration()
        assert bench.session.sent[1:] == [wire.FreeBlocks(offsets[2:])]

    run(scenario)


def test_the_blocks_of_a_worker_that_is_gone_stay_readable_and_no_message_says_that_they_are_free(bench: Bench) -> None:
    async def scenario() -> None:
        arena = bench.announce_arena()
        offsets = [bench.write(content * 5000) for content in (b"x", b"y")]
        first, second = (taken(bench, request(), "A", named(0, at, 5000)) for at in offsets)
        first.lease.release()
        bench.memory.close()
        bench.workers_arena.close()
        await end_of_iteration()
        assert bench.session.sent == [], "the message would have been sent at the end of the iteration"
        consumer = second.shared()
        second.lease.release()
        assert bytes(consumer.lease.region.view(consumer.offset, 5000)) == b"y" * 5000
        assert bench.budget.used_byte_size == 5000
        assert not arena.region.closed
        consumer.lease.release()
        assert arena.region.closed
        await end_of_iteration()
        assert bench.session.sent == []

    run(scenario)


# ---- outputs --------------------------------------------------------------------------------


def test_an_output_in_an_arena_that_was_never_created_is_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="a span in an output arena that was not created"):
        taken(bench, request(), "A", named(wire.OUTPUT_ARENA, 0, 4))


@pytest.mark.parametrize(("offset", "byte_size"), [(-1, 1), (0, -1), (CAPACITY, 1), (CAPACITY - 1, 2), (1 << 62, 1)])
def test_an_output_outside_of_the_workers_arena_is_refused(bench: Bench, offset: int, byte_size: int) -> None:
    arena = bench.announce_arena()
    with pytest.raises(ValueError, match="outside of the worker's arena"):
        taken(bench, request(), "A", named(wire.OUTPUT_ARENA, offset, byte_size))
    assert arena.leased_block_count == 0


def test_an_output_that_was_written_to_the_clients_region_is_the_one_that_the_client_asked_for(bench: Bench) -> None:
    region = bench.clients_region
    wanted = RequestedOutput("A", 0, Span(region.lease(), 64, 16))
    asked = request(outputs=(wanted,))
    span = taken(bench, asked, "A", named(region.number, 64, 8), final=False)
    assert (span.lease.region, span.offset, span.byte_size) == (region, 64, 16)
    assert region.lease_count == 2, "the response has a lease of its own"
    with pytest.raises(ValueError, match="outside of the request's inputs and outputs"):
        taken(bench, asked, "B", named(region.number, 64, 8))
    span.lease.release()
    span = taken(bench, asked, "A", named(region.number, 64, 8))
    assert (span.lease.region, span.offset, span.byte_size) == (region, 64, 16)
    assert region.lease_count == 1, "the final response has the lease of the request"
    asked.release_leases()
    assert region.lease_count == 1
    span.lease.release()


def test_an_output_within_an_input_keeps_the_inputs_block(bench: Bench) -> None:
    asked = request(bench.input())
    place = asked.inputs[0].span
    assert place is not None
    number = bench.kernels_arena.region.number
    span = taken(bench, asked, "A", named(number, place.offset + 4096, 4096))
    assert (span.offset, span.byte_size) == (place.offset + 4096, 4096)
    asked.release_leases()
    assert bench.blocks_of_kernel == 1
    span.lease.release()
    assert bench.blocks_of_kernel == 0


def test_only_a_final_response_may_name_an_input(bench: Bench) -> None:
    asked = request(bench.input())
    place = asked.inputs[0].span
    assert place is not None
    with pytest.raises(ValueError, match="outside of the request's inputs and outputs"):
        taken(bench, asked, "A", named(place.lease.region_number, place.offset, 8192), final=False)
    asked.release_leases()


def test_an_output_in_a_region_that_is_not_the_requests_is_refused(bench: Bench) -> None:
    asked, other = request(bench.input_of_client()), request(bench.input())
    place = other.inputs[0].span
    assert place is not None
    for region, offset in ((place.lease.region_number, place.offset), (bench.clients_region.number, 0), (99, 0)):
        with pytest.raises(ValueError, match=f"an output at {offset} of region {region}, outside of the request's"):
            taken(bench, asked, "A", named(region, offset, 64))
    asked.release_leases()
    other.release_leases()


# ---- inputs that the model keeps ------------------------------------------------------------


def test_held_inputs_stay_as_they_are_until_the_model_lets_them_go(bench: Bench) -> None:
    asked = request(bench.input(), bench.input(), Tensor("B", "UINT8", [1], b"x"))
    bench.memory.hold(7, asked)
    asked.release_leases()
    assert bench.blocks_of_kernel == 2
    bench.memory.free_held([7])
    assert bench.blocks_of_kernel == 0


def test_a_clients_region_is_not_held(bench: Bench) -> None:
    asked = request(bench.input_of_client())
    bench.memory.hold(7, asked)
    asked.release_leases()
    assert bench.clients_region.lease_count == 0
    bench.memory.free_held([7])


def test_what_is_held_is_held_once_and_freed_once(bench: Bench) -> None:
    asked = request(bench.input())
    bench.memory.hold(7, asked)
    with pytest.raises(ValueError, match="held inputs of request 7, which are held already"):
        bench.memory.hold(7, asked)
    asked.release_leases()
    with pytest.raises(ValueError, match="freed inputs of request 8, which were not held"):
        bench.memory.free_held([7, 8])
    assert bench.blocks_of_kernel == 0
    with pytest.raises(ValueError, match="freed inputs of request 7, which were not held"):
        bench.memory.free_held([7])


def test_a_worker_that_is_gone_holds_nothing(bench: Bench) -> None:
    for number in (7, 8):
        asked = request(bench.input())
        bench.memory.hold(number, asked)
        asked.release_leases()
    bench.memory.close()
    assert bench.blocks_of_kernel == 0
