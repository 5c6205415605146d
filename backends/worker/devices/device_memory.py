"""Regions in memory of a CUDA device, of clients and of other workers. Models that compute on the host get copies.

A handle is opened once, when a request first uses the region. It is closed when the region has gone and nothing refers
to its memory any more: a model may keep a tensor longer than its request lasts.

Memory of the device that another worker has allocated, and the kernel has leased for this one.

The lease ends when nothing in this process refers to the memory any more, and nothing reads it on the device: the
worker that has it writes something else there then.

Memory of the device in which the worker leaves tensors for other workers: results, and inputs of calls.

It is allocated in a few pieces, the arenas. Each is exported once, and other workers open it once. An arena stays until
the worker ends: memory that is freed while another process has it open would cost that process its device. Blocks are
freed when the kernel says so, as those of the arena on the host (`backends/worker/output_memory.py`).

How much there may be is a part of what `--cuda-memory-pool-byte-size` allows. Where that is not enough, tensors go
through the host.

Workers of one process leave their arenas to the process: the next worker takes them. CUDA lets no process open its own
handle, so one worker finds the arenas of another one by their handles.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, NoReturn

from backends.transport import wire
from backends.worker.devices.instance_device import DeviceBlock, end_if_lost
from backends.worker.devices.tensors import DeviceArray
from backends.worker.held_inputs import WatchedInput
from backends.worker.memory import CopyingRegion
from kernel.errors import InternalError, InvalidArgument
from shm.blocks import BlockAllocator
from shm.cuda import TOO_SMALL, UNAVAILABLE, CudaError, CudaUnavailable, DeviceMemory, cuda
from shm.datatypes import DATATYPES, element_count
from shm.lease import RegionNumber
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.memory import CopyBuffers
    from backends.worker.request import WorkerRequest
    from shm.cuda import Cuda
    from shm.tensor import Buffer

logger = logging.getLogger(__name__)


class OpenedMemory:
    """Memory of another process that is open in this one as long as something refers to it."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.address, self.byte_size, self.device_id = memory.address, memory.byte_size, memory.device_id
        self.memory = memory

    @staticmethod
    def opened(cuda: Cuda, memory: DeviceMemory) -> OpenedMemory:
        """Return memory that a handle has opened. It is closed with the last reference."""
        found = OpenedMemory(memory)
        weakref.finalize(found, _close, cuda, memory).atexit = False
        return found


def _close(cuda: Cuda, memory: DeviceMemory) -> None:
    try:
        cuda.close_handle(memory)
    except CudaError as error:  # the exporter has ended, perhaps: nothing is left to close
        logger.debug("a CUDA region could not be closed: %s", error)


class DeviceRegion(CopyingRegion):
    """A region on a device: a client's, or an arena of another worker."""

    def __init__(
        self, handle: bytes, byte_size: int, device_id: int, buffers: CopyBuffers, *, of_worker: bool = False
    ) -> None:
        """Copies are made in `buffers`."""
        self.number = 0
        #: Whether the kernel must know what is held of it: another worker has allocated it.
        self.of_worker = of_worker
        self._handle = handle
        self._byte_size = byte_size
        self._device_id = device_id
        self._buffers = buffers
        self._memory: OpenedMemory | None = None

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes at `offset`. Raises `InvalidArgument`."""
        source = self.device_memory()
        try:
            cuda().copy_to_host(source.memory, offset, memory)
        except CudaError as error:
            self._failed("read", error)

    def write_from(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`. Raises `InvalidArgument`."""
        target = self.device_memory()
        try:
            cuda().copy_from_host(target.memory, offset, data)
        except CudaError as error:
            self._failed("written", error)

    def device_memory(self) -> OpenedMemory:
        """Return the memory after it was opened. Raises `InvalidArgument`."""
        if self._memory is not None:
            return self._memory
        own = SHARED_ARENAS.find(self._handle)
        if own is not None:
            self._memory = OpenedMemory(DeviceMemory(own.address, own.byte_size, own.device_id))
            return self._memory
        try:
            devices = cuda()
        except CudaUnavailable as error:
            raise InvalidArgument(f"{UNAVAILABLE}{error}") from None
        try:
            memory = devices.open_handle(self._handle, self._device_id)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        except CudaError as error:
            self._failed("opened", error)
        self._memory = OpenedMemory.opened(devices, memory)
        if memory.byte_size < self._byte_size:
            self._memory = None
            raise InvalidArgument(
                f"{TOO_SMALL}{memory.byte_size} bytes, and the region was registered with {self._byte_size}"
            )
        return self._memory

    def close(self) -> None:
        """See `WorkerRegion`. The memory stays open for tensors over it."""
        self._memory = None

    def _failed(self, what: str, error: CudaError) -> NoReturn:
        """Raise `InvalidArgument`, or end the process if it cannot use the device any more: it is replaced."""
        end_if_lost(error)
        text = f"a CUDA shared memory region cannot be {what}: {error}"
        if self.of_worker:
            text = (
                f"memory of another worker on GPU {self._device_id} cannot be {what} (with "
                f"--cuda-memory-pool-byte-size={self._device_id}:0 tensors go through the host): {error}"
            )
        raise InvalidArgument(f"{text}: {error.reason}" if error.reason else text) from None


class OwnDeviceRegion(DeviceRegion):
    """An arena of this worker: what it has left there for others, and gets itself. It is never opened by a handle."""

    def __init__(self, memory: DeviceBlock, buffers: CopyBuffers) -> None:
        super().__init__(b"", memory.byte_size, memory.device_id, buffers, of_worker=True)
        self._memory = OpenedMemory(DeviceMemory(memory.address, memory.byte_size, memory.device_id))

    def close(self) -> None:
        """See `WorkerRegion`. The arena stays."""


class LeasedMemory:
    """The owner of the arrays over one tensor: as long as it lives, the tensor is leased and its memory open."""

    __slots__ = ("__weakref__", "_memory", "readers")

    def __init__(self, memory: OpenedMemory) -> None:
        self._memory = memory
        #: The streams on which libraries may read it, as `__dlpack__` numbers them.
        self.readers: set[int] = set()


class WatchedMemory(WatchedInput):
    """Knows whether a `LeasedMemory` still lives."""

    __slots__ = ("_device", "_readers")

    def __init__(self, region: DeviceRegion, span: Span, owner: LeasedMemory, device: InstanceDevice) -> None:
        super().__init__(region, span.offset, span.byte_size, owner)
        self._device = device
        # Not the owner: it could not be freed.
        self._readers = owner.readers

    def end(self) -> None:
        """Nothing refers to the memory any more: wait until what libraries have enqueued has read it.

        What this worker has enqueued itself has referred to the memory until it was done.
        """
        if self._readers:
            try:
                self._device.finish_readers(self._readers)
            except InternalError as error:  # the device works no more as it should: the next request says so
                logger.warning("a tensor of another model is released: %s", error.message)


#: The smallest arena. A handle opens whole pages of the device, which have 2 MiB (cudaMalloc): an arena is alone in its
#: pages, so that nothing else is opened with it.
MIN_ARENA_BYTE_SIZE = 2 << 20


def arena_byte_size(wanted: int, allocated: int, room: int) -> int | None:
    """Return the size of the next arena for a tensor of `wanted` bytes; None where `room` is not enough.

    It is a power of two, and doubles what is `allocated`, so that there are few arenas. Pure.
    """
    least = max(MIN_ARENA_BYTE_SIZE, 1 << (wanted - 1).bit_length())
    size = max(least, 1 << (allocated.bit_length() - 1) if allocated else 0)
    while size > max(room, least):
        size //= 2
    return size if size <= room else None


class SharedArenas:
    """The arenas of all workers of this process, where there are several. Callable from any thread.

    They are freed with the process: who has opened one would lose its device.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Handle → memory.
        self._memory: dict[bytes, DeviceBlock] = {}
        #: The handles of those whose worker has ended.
        self._left: list[bytes] = []

    def find(self, handle: bytes) -> DeviceBlock | None:
        """Return the memory of a handle that a worker of this process has exported; None for others."""
        return self._memory.get(handle)

    def add(self, handle: bytes, memory: DeviceBlock) -> None:
        """Note an arena that a worker has exported."""
        with self._lock:
            self._memory[handle] = memory

    def take(self, device_id: int, least: int, most: int) -> tuple[bytes, DeviceBlock] | None:
        """Return an arena on a device that another worker has left, with `least` to `most` bytes; None without one."""
        with self._lock:
            for handle in self._left:
                memory = self._memory[handle]
                if memory.device_id == device_id and least <= memory.byte_size <= most:
                    self._left.remove(handle)
                    return handle, memory
        return None

    def leave(self, handles: Iterable[bytes]) -> None:
        """Note that the worker of these arenas has ended."""
        with self._lock:
            self._left.extend(handles)


#: Those of this process. Empty in the process of a single worker.
SHARED_ARENAS = SharedArenas()


class _DeviceArena:
    __slots__ = ("allocator", "handle", "lease", "memory")

    def __init__(self, memory: DeviceBlock, number: int, handle: bytes) -> None:
        self.memory = memory
        self.handle = handle
        # All that is freed stays: the pages of a device are never given back.
        self.allocator = BlockAllocator(memory.byte_size, memory.byte_size)
        self.lease = RegionNumber(number)


class DeviceArenas:
    """The arenas of one worker. Callable from any thread."""

    def __init__(
        self, device: InstanceDevice, announce: Callable[[wire.DeviceArenaCreated], None], *, shares: bool = False
    ) -> None:
        """`announce` tells the kernel of a new arena. With `shares`, other workers of this process see the arenas, and
        get them when this one ends."""
        self._device = device
        self._announce = announce
        self._shares = shares
        #: By number, which is below 0.
        self._arenas: dict[int, _DeviceArena] = {}
        #: What the arenas have together.
        self.byte_size = 0
        self._lock = threading.Lock()
        self._exportable = True

    def take(self, byte_size: int) -> tuple[Span, int] | None:
        """Return the span of a new block and its address; None if there is no memory for it, or none can be shared."""
        with self._lock:
            for number in self._arenas:
                found = self._block(number, byte_size)
                if found is not None:
                    return found
            added = self._add(byte_size)
            return None if added is None else self._block(added, byte_size)

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> DeviceArray | None:
        """Return memory for an output in which a backend may compute it; None if there is none.

        The block is freed with the request if it does not respond with it.
        """
        byte_size = element_count(shape) * DATATYPES[datatype].byte_size
        former = request.reserved.pop(name, None)
        if former is not None and former[1].span is not None:
            self.drop(former[1].span)
        place = self.take(byte_size) if byte_size else None
        if place is None:
            return None
        span, address = place
        array = DeviceArray(address, datatype, shape, self._device.device_id)
        request.reserved[name] = array, Tensor(name, datatype, list(shape), None, span)
        return array

    def _block(self, number: int, byte_size: int) -> tuple[Span, int] | None:
        arena = self._arenas[number]
        offset = arena.allocator.take(byte_size)
        if offset is None:
            return None
        return Span(arena.lease, offset, byte_size), arena.memory.address + offset

    def _add(self, byte_size: int) -> int | None:
        """Allocate and announce another arena; return its number, or None if there is no room for it."""
        device = self._device
        size = arena_byte_size(byte_size, self.byte_size, device.pool_room)
        if size is None or not self._exportable:
            return None
        found = SHARED_ARENAS.take(device.device_id, size, device.pool_room) if self._shares else None
        if found is None:
            found = self._exported(size)
            if found is None:
                return None
            if self._shares:
                SHARED_ARENAS.add(*found)
        handle, memory = found
        number = -len(self._arenas) - 1
        self._arenas[number] = _DeviceArena(memory, number, handle)
        self.byte_size += memory.byte_size
        device.pooled(memory.byte_size)
        self._announce(wire.DeviceArenaCreated(number, memory.byte_size, device.device_id, handle))
        return number

    def _exported(self, byte_size: int) -> tuple[bytes, DeviceBlock] | None:
        """Return the handle of new memory, and the memory; None if there is none."""
        device = self._device
        try:
            memory = DeviceBlock(device.cuda, byte_size, device.device_id)
        except CudaError as error:  # the device is full: others may free memory later
            end_if_lost(error)
            logger.warning("no %d bytes on GPU %d for tensors between models: %s", byte_size, device.device_id, error)
            return None
        try:
            return device.cuda.export_handle(memory.address), memory
        except CudaError as error:  # not every platform has handles
            end_if_lost(error)
            memory.free()
            self._exportable = False
            logger.warning("tensors between models go through the host: GPU %d: %s", device.device_id, error)
            return None

    def close(self) -> None:
        """Leave the arenas to the other workers of this process. Nothing is enqueued that uses them."""
        if self._shares:
            SHARED_ARENAS.leave(arena.handle for arena in self._arenas.values())
            self._arenas.clear()

    def free(self, number: int, offsets: Sequence[int]) -> None:
        """Free blocks of an arena. Raises KeyError for those that are not in use, which is a bug of ours."""
        with self._lock:
            for offset in offsets:
                self._arenas[number].allocator.free(offset)

    def drop(self, span: Span) -> None:
        """Free the block of a tensor that is not sent."""
        self.free(span.lease.region_number, [span.offset])

    def region_of(self, number: int, buffers: CopyBuffers) -> OwnDeviceRegion:
        """Return an arena as a region that is attached. Copies of what is in it are made in `buffers`."""
        return OwnDeviceRegion(self._arenas[number].memory, buffers)

    @property
    def block_count(self) -> int:
        """How many blocks are in use."""
        with self._lock:
            return sum(arena.allocator.block_count for arena in self._arenas.values())
