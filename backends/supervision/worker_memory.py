"""The memory that the kernel shares with one worker: attached regions, held inputs, and the worker's output arena.

`backends/supervision/handle.py` uses it for tensors that are not inline.
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import chain
from typing import TYPE_CHECKING

from backends.transport import wire
from kernel.errors import ServingError, Unavailable, file_error
from kernel.loop.iteration_end import IterationEnd
from shm.cuda import HANDLE_BYTE_SIZE
from shm.lease import LeasedBlock
from shm.region import CudaIpcHandle, FileHandle, Region, RegionKind, check_sealed, read_only_fd
from shm.tensor import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from backends.supervision.session import WorkerSession
    from kernel.serving.request import Request
    from kernel.serving.response import Response
    from shm.blocks import ByteBudget
    from shm.lease import Lease
    from shm.tensor import Buffer, Tensor


class OutputArena:
    """A worker's output arena: a region from which responses are sent to clients, and which can be attached to other
    workers.

    The worker allocates blocks. The kernel counts the leases of each block, and frees a block when its last lease is
    released. If the worker is gone, its blocks on the host stay readable as long as they are leased.
    """

    def __init__(
        self, region: Region, memory: WorkerMemory, budget: ByteBudget | None = None, number: int = wire.OUTPUT_ARENA
    ) -> None:
        """`number` is the arena's number in messages to and from its worker."""
        self.region = region
        self._memory = memory
        self._budget = budget
        self.number = number
        self._blocks: dict[int, LeasedBlock] = {}
        #: The byte sizes of the leased blocks, as the budget counts them.
        self._charged: dict[int, int] = {}

    def lease(self, offset: int, byte_size: int) -> Lease:
        """Return a lease of the block at `offset`, which has a tensor of `byte_size` bytes. Raises ValueError."""
        if min(offset, byte_size) < 0 or offset + byte_size > self.region.byte_size:
            raise ValueError(f"an output at {offset}, outside of the worker's arena")
        block = self._blocks.get(offset)
        if block is None:
            block = self._blocks[offset] = LeasedBlock(self.region, offset, self._freed)
            if self._budget is not None:
                self._budget.add(byte_size)
                self._charged[offset] = byte_size
        return block.lease()

    @property
    def leased_block_count(self) -> int:
        return len(self._blocks)

    def _freed(self, offset: int) -> None:
        del self._blocks[offset]
        if self._budget is not None:
            self._budget.remove(self._charged.pop(offset))
        self._memory.free_blocks([offset], self.number)

    def close(self) -> None:
        """The worker is gone: free the arena when all leases are released. Memory of a device has gone with it."""
        if self.region.kind is RegionKind.DEVICE:
            self.region.lose()
        else:
            self.region.drop()


class WorkerMemory:
    """The memory that one worker and the kernel share. Each `ValueError` is for a message that breaks the protocol.

    `RemoteMemory` has the same interface, for a worker that shares no memory.
    """

    #: Whether responses must be sent by `deliver`, because their outputs may not be in their places yet.
    defers = False

    #: Whether the worker can open memory of devices that other workers have allocated.
    opens_devices = True

    #: The number of the last batch that was sent: each one is, as soon as it is dispatched.
    last_sent = sys.maxsize

    def __init__(self, session: WorkerSession, title: str, budget: ByteBudget | None = None) -> None:
        """The worker's outputs count in `budget` as long as they are leased."""
        self._session = session
        self._title = title
        self._budget = budget
        #: Numbers of the regions that the worker knows. Read-only for others.
        self.attached: set[int] = set()
        #: Regions of clients that the worker may have mapped, by number.
        self.mapped_client_regions: dict[int, Region] = {}
        #: How many first bytes of arenas the worker may pin: their pages are not given back to the system any more.
        self.steady_byte_size = 0
        #: None before the worker's first large output.
        self.output_arena: OutputArena | None = None
        #: The worker's arenas on a device, by their numbers, which are below 0.
        self.device_arenas: dict[int, OutputArena] = {}
        #: Blocks of arenas that were freed in this event-loop iteration: arena → offsets.
        self._freed: dict[int, list[int]] = {}
        #: Attached regions on a device whose workers are gone, by number.
        self._gone: set[int] = set()
        #: Set when no block on a device is leased any more; None while nobody waits for that.
        self._released: asyncio.Event | None = None
        #: Held inputs, by request number.
        self._held: dict[int, list[Span]] = {}
        self._closed = False

    # ---- tensors of requests -----------------------------------------------------------------

    def attach(self, region: Region, *, writable: bool) -> None:
        """Announce a region to the worker, before a message names a span of it.

        Raises `OSError`, and `Unavailable` for memory of a device whose worker is gone.
        """
        if region.number in self.attached:
            return
        if self.output_arena is not None and region is self.output_arena.region:
            self._session.send(wire.OwnArena(region.number))
        elif region.kind is RegionKind.DEVICE:
            self._attach_device(region)
        else:
            self._send_region(region, writable=writable)
        self.attached.add(region.number)
        region.on_closed(self._detach)
        if region.copied:
            self.mapped_client_regions.pop(region.number, None)
        elif region.kind is RegionKind.SYSTEM:
            self.mapped_client_regions[region.number] = region
            region.on_copied(self._attach_copied)

    def _attach_device(self, region: Region) -> None:
        """Announce an arena on a device, perhaps one of the worker itself. Raises `Unavailable`."""
        if region.lost:
            raise Unavailable(f"a tensor on GPU {region.device_id} is gone with the worker that had it: {region.name}")
        own = next((number for number, arena in self.device_arenas.items() if arena.region is region), None)
        if own is not None:
            self._session.send(wire.OwnArena(region.number, own))
        else:
            self._send_region(region, writable=True)
        region.on_lost(self._forget)

    def _forget(self, region: Region) -> None:
        """The worker that has an arena on a device is gone: `attach` refuses the arena from now on."""
        if region.number in self.attached:
            self.attached.discard(region.number)
            self._gone.add(region.number)

    def _send_region(self, region: Region, *, writable: bool) -> None:
        if isinstance(region.handle, CudaIpcHandle):
            handle = region.handle
            self._session.send(
                wire.AttachDevice(
                    region.number, region.byte_size, handle.device_id, handle.raw, region.kind is RegionKind.DEVICE
                )
            )
            return
        message = wire.Attach(region.number, region.byte_size, region.offset, writable, region.of_client, region.copied)
        if self.steady_byte_size and writable and region.kind is RegionKind.ARENA:
            steady = min(self.steady_byte_size, region.byte_size)
            region.steady_byte_size = max(steady, region.steady_byte_size)
            message.steady_byte_size = steady
        if writable:
            self._session.send_with_fd(message, region.fd)
            return
        fd = read_only_fd(region.fd)
        try:
            self._session.send_with_fd(message, fd)
        finally:
            os.close(fd)

    def _detach(self, region: Region) -> None:
        known = self.mapped_client_regions.pop(region.number, None) is not None or region.number in self._gone
        if (known or region.number in self.attached) and not self._closed:
            self.attached.discard(region.number)
            self._gone.discard(region.number)
            self._session.send(wire.Detach(region.number))

    def _attach_copied(self, region: Region) -> None:
        """Let the worker copy the bytes of a region that it may have mapped."""
        if region.number not in self.attached or self._closed:
            return
        try:
            self._send_region(region, writable=True)
        except OSError:  # no descriptor is left: the next request that uses the region tries again
            self.attached.discard(region.number)
        else:
            del self.mapped_client_regions[region.number]

    def report_fault(self, requests: Collection[Request]) -> None:
        """The worker died by SIGBUS while it had `requests`: report which regions of clients may be the cause."""
        mapped = list(self.mapped_client_regions.values())
        spans = [tensor.span for request in requests for tensor in request.inputs]
        spans += [output.span for request in requests for output in request.outputs]
        used = {span.lease.region_number for span in spans if span is not None}
        if mapped and mapped[0].on_fault is not None:
            mapped[0].on_fault(mapped, [region for region in mapped if region.number in used])

    def hold(self, number: int, request: Request) -> None:
        """Lease the inputs of a request in arenas also after its final response. Raises ValueError."""
        if number in self._held:
            raise ValueError(f"held inputs of request {number}, which are held already")
        self._held[number] = [
            tensor.span.shared()
            for tensor in request.inputs
            if tensor.span is not None and not tensor.span.lease.region.of_client
        ]

    def free_held(self, numbers: Sequence[int]) -> None:
        """Release the held inputs of these requests. Raises ValueError."""
        for number in numbers:
            held = self._held.pop(number, None)
            if held is None:
                raise ValueError(f"freed inputs of request {number}, which were not held")
            for span in held:
                span.lease.release()

    # ---- tensors of responses ----------------------------------------------------------------

    def take_output_arena(self, byte_size: int) -> None:
        """Open the worker's output arena with the received descriptor. Raises ValueError."""
        fd = self._session.take_fd()
        try:
            if self.output_arena is not None:
                raise ValueError("a second output arena")
            check_sealed(fd, byte_size)
        except BaseException:
            os.close(fd)
            raise
        region = Region(f"outputs of {self._title}", RegionKind.ARENA, FileHandle(fd), byte_size)
        self.output_arena = OutputArena(region, self, self._budget)

    def take_device_arena(self, message: wire.DeviceArenaCreated) -> None:
        """Note an arena of the worker on a device. Raises ValueError."""
        number = message.arena
        if number >= wire.OUTPUT_ARENA or number in self.device_arenas or len(message.handle) != HANDLE_BYTE_SIZE:
            raise ValueError(f"an arena {number} on a device")
        handle = CudaIpcHandle(message.handle, message.device_id)
        region = Region(f"outputs of {self._title}", RegionKind.DEVICE, handle, message.byte_size)
        # Without the budget, which is of memory of the host: the worker limits what it allocates.
        self.device_arenas[number] = OutputArena(region, self, number=number)

    def own_span(self, span: Span) -> Span:
        """Return a place in an arena of the worker, which the worker named, with a lease. Raises ValueError."""
        number = span.lease.region_number
        arena = self.output_arena if number == wire.OUTPUT_ARENA else self.device_arenas.get(number)
        if arena is None:
            raise ValueError("a span in an output arena that was not created")
        return Span(arena.lease(span.offset, span.byte_size), span.offset, span.byte_size)

    def take_output(self, request: Request, tensor: Tensor, span: Span, *, final: bool) -> None:
        """Give an output, which the worker left in `span`, its place with a lease for the response.

        It lies in the worker's arena, in the client's region that the request named for it, or, in a final response, in
        an input of the request: the model may change inputs until then. It is on a device only if the request allows
        that. Raises ValueError for any other place.
        """
        number = span.lease.region_number
        if number == wire.OUTPUT_ARENA:
            tensor.span = self.own_span(span)
        elif number < wire.OUTPUT_ARENA:
            if not any(asked.on_device and asked.name == tensor.name for asked in request.outputs):
                raise ValueError(f"output '{tensor.name}' on a device, where it was not asked for")
            tensor.span = self.own_span(span)
        else:
            tensor.span = self._span_of_request(request, tensor.name, span, final=final)

    def _span_of_request(self, request: Request, name: str, span: Span, *, final: bool) -> Span:
        number = span.lease.region_number
        for asked in request.outputs:
            place = asked.span
            if asked.name == name and place is not None and place.lease.region_number == number:
                if final:  # the request has ended: its lease is the response's from now on
                    asked.span = None
                    return place
                return place.shared()
        for tensor in request.inputs if final else ():
            place = tensor.span
            if place is None or place.lease.region_number != number or place.lease.region.of_client:
                continue
            if place.holds(span.offset, span.byte_size):
                return Span(place.lease.share(), span.offset, span.byte_size)
        raise ValueError(f"an output at {span.offset} of region {number}, outside of the request's inputs and outputs")

    # ---- calls of other models ---------------------------------------------------------------

    def take_call_input(
        self, tensor: Tensor, span: Span, requests: Mapping[int, Request], results: Mapping[int, Tensor]
    ) -> None:
        """Give an input of a call, which the worker named by `span`, its place with a lease.

        It lies in an arena of the worker, in an input of one of its `requests`, in a held input, or in one of its
        `results`. Raises ValueError for any other place.
        """
        number = span.lease.region_number
        if number <= wire.OUTPUT_ARENA:
            tensor.span = self.own_span(span)
            return
        inputs = (each.span for request in requests.values() for each in request.inputs)
        held = (each for spans in self._held.values() for each in spans)
        kept = (each.span for each in results.values())
        for place in chain(inputs, kept, held):
            if place is not None and place.lease.region_number == number and place.holds(span.offset, span.byte_size):
                tensor.span = Span(place.lease.share(), span.offset, span.byte_size)
                return
        raise ValueError(f"an input of a call at {span.offset} of region {number}, which the worker does not use")

    def deliver_result(self, call: int, response: Response, deliver: Callable[[int, Response], None]) -> None:
        """Make the outputs of a response to a call known to the worker, then `deliver` it."""
        try:
            for tensor in response.outputs or () if response.leased else ():
                if tensor.span is not None and tensor.span.lease.region.number not in self.attached:
                    self.attach(tensor.span.lease.region, writable=False)
        except (OSError, ServingError) as error:
            response.release()
            response.outputs = None
            text = f"a result could not be given to the worker of '{self._title}': {error}"
            response.error = file_error(text, error) if isinstance(error, OSError) else error
        deliver(call, response)

    # ---- responses ---------------------------------------------------------------------------

    def deliver(self, request: Request, response: Response) -> None:
        """Send `response`: its outputs are in their places."""
        request.respond(response)

    def finished(self, request: int) -> None:
        """Do nothing: the worker has no copies of a finished request."""

    def begin_transfer(self, number: int, byte_size: int) -> None:
        """Refuse: the worker shares its memory."""
        raise ValueError("a transfer in a session with shared memory")

    def add_chunk(self, number: int, offset: int, data: Buffer) -> None:
        """Refuse, see `begin_transfer`."""
        raise ValueError("a chunk in a session with shared memory")

    def free_blocks(self, offsets: Sequence[int], arena: int = wire.OUTPUT_ARENA) -> None:
        """Free blocks of an arena of the worker, which gets one message for each arena and event-loop iteration."""
        if self._closed:
            return
        if self._released is not None and not any(each.leased_block_count for each in self.device_arenas.values()):
            self._released.set()
        if not self._freed:
            IterationEnd.current().add_decision(self._send_freed)
        self._freed.setdefault(arena, []).extend(offsets)

    async def released(self) -> None:
        """Wait until no block of the worker on a device is leased, or the worker is gone."""
        if not self._closed and any(arena.leased_block_count for arena in self.device_arenas.values()):
            self._released = self._released or asyncio.Event()
            await self._released.wait()

    def _send_freed(self) -> None:
        freed, self._freed = self._freed, {}
        if not self._closed:
            for arena, offsets in freed.items():
                self._session.send(wire.FreeBlocks(offsets, arena))

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """The worker is gone: release its held inputs and its output arena."""
        self._closed = True
        self.free_held(list(self._held))
        if self.output_arena is not None:
            self.output_arena.close()
        for arena in self.device_arenas.values():
            arena.close()
        if self._released is not None:
            self._released.set()
