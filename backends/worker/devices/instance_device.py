"""The device of a model instance: its stream, its memory, and copies to and from it.

All that the worker and the backend do for a batch is enqueued on one stream; the worker waits for it once, before the
responses leave. While batches follow one another they overlap: copies in, computation and copies out of a batch have a
stream each, in order by events, and the next batch is enqueued before the last one is waited for.
docs/decisions/gpu-workers.md has the reasons.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from backends.worker.devices.batch_on_device import BatchOnDevice, EnqueuedBatch
from backends.worker.devices.pinning_policy import PinnedBudget
from backends.worker.devices.staging import NO_LIMITS, CopyStage, StagingLimits, gathered
from backends.worker.devices.tensors import DeviceArray
from kernel.errors import InternalError, Unavailable
from shm.arrays import NUMPY_TYPES, address_of
from shm.cuda import CudaError
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from backends.reshape import TensorShapes
    from backends.worker.devices.batch_on_device import Stages
    from backends.worker.devices.device_memory import DeviceArenas
    from backends.worker.devices.pinning import HostPinning
    from backends.worker.memory import AttachedRegions
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array
    from shm.cuda import Cuda
    from shm.tensor import Buffer

logger = logging.getLogger(__name__)

#: The alignment of all that models read and write on a device, in bytes: cudaMalloc's.
ALIGNMENT = 256

#: The longest waits that use the processor, in nanoseconds.
POLL_NS = 100_000

#: Handles of the default streams of the current device: the legacy one (0 and 1), and the thread's.
DEFAULT_STREAMS = (0, 1, 2)

_NOTHING = contextlib.nullcontext()

#: The exit code of a worker that has lost its device.
LOST_DEVICE_EXIT_CODE = 70


class DeviceBlock:
    """Memory of the device. It is freed when nothing refers to it any more, or with `free`."""

    def __init__(self, cuda: Cuda, byte_size: int, device_id: int) -> None:
        """Raises `CudaError` if there is no memory."""
        self.byte_size = byte_size
        self.device_id = device_id
        self.address = cuda.allocate(max(byte_size, 1), device_id)
        self._finalizer = weakref.finalize(self, _freed, cuda, self.address, device_id)
        self._finalizer.atexit = False  # the system frees the memory with the process

    def free(self) -> None:
        """Free the memory now."""
        self._finalizer()


class _Thread(threading.local):
    """What is known of the thread that asks."""

    #: Whether it has a current device that it may use.
    entered = False


def _freed(cuda: Cuda, address: int, device_id: int) -> None:
    try:
        cuda.free(address, device_id)
    except CudaError as error:
        end_if_lost(error)


class InstanceDevice:
    """The device of the one instance of this worker; `backends.base.Host.device`.

    `gather` is for the thread that executes; any thread may call the other methods.
    """

    def __init__(
        self,
        cuda: Cuda,
        device_id: int,
        regions: AttachedRegions,
        limits: StagingLimits = NO_LIMITS,
        *,
        late: bool = False,
    ) -> None:
        """`limits` are for the memory in which batches are gathered.

        With `late` the device is opened when it is first needed, or by `open`: a context takes some hundred megabytes
        of the device. Raises `Unavailable` if the device cannot be used.
        """
        if not 0 <= device_id < cuda.device_count:
            raise Unavailable(f"GPU {device_id} does not exist: this process sees {cuda.device_count}")
        self.cuda = cuda
        #: The number of the GPU, as this process sees it.
        self.device_id = device_id
        self._regions = regions
        #: The stream and the event of the instance; None before the device is opened.
        self._opened: tuple[Any, Any] | None = None
        self._opening = threading.Lock()
        self._thread = _Thread()
        if not late:
            self.open()
        self._lock = threading.Lock()
        #: Whether something was enqueued since the last wait.
        self.pending = False
        #: What is kept of memory of the device between batches, and the limit of that, in bytes.
        self.pooled_byte_size = 0
        #: Called with that when it has changed.
        self.on_pooled: Callable[[int], None] = lambda byte_size: None
        self._pool_byte_size = limits.kept_byte_size
        #: Where tensors for other workers are left; None if they cannot be.
        self.arenas: DeviceArenas | None = None
        #: The pinned bytes of the host that the instance may have.
        self.pinned_budget = PinnedBudget(limits.pinned_byte_size)
        #: Pins shared memory; None where there is none.
        self.pinning: HostPinning | None = None
        self._limits = limits
        #: That of the batch that is enqueued now, and the other one, which is there from the first overlap on.
        self._batch = BatchOnDevice(self, limits)
        self._other: BatchOnDevice | None = None
        #: 0 or 1: which of two blocks the batch may use, where a backend has memory that the next batch would change.
        self.block_set = 0
        #: The streams of copies in and copies out, while batches overlap; None if they were never needed.
        self._copy_streams: tuple[Any, Any] | None = None
        self._overlaps = False
        #: Whether outputs of this batch are copied on the stream that computes (`keeps_outputs_in_order`).
        self._copies_in_order = False
        #: Whether the stages of batches that do not overlap are measured, and the stages of the last one.
        self.timed = False
        self.stages: Stages | None = None
        #: How long a wait may use the processor, in nanoseconds: to sleep and be woken takes 10 to 60 us. 0 where other
        #: threads would wait for the interpreter's lock meanwhile. And how long the last wait took.
        self.poll_ns, self._waited_ns = POLL_NS, 0
        #: How many copies there were between host and device, or between devices, and their bytes.
        self.copies = self.copied_byte_size = 0

    # ---- the device ------------------------------------------------------------------------------

    def open(self) -> tuple[Any, Any]:
        """Make the context, the stream and the event, unless they are there, and return the last two.

        Raises `Unavailable`.
        """
        with self._opening:
            if self._opened is None:
                cuda, device_id = self.cuda, self.device_id
                try:
                    cuda.keeps_current = True
                    self._opened = cuda.new_stream(device_id), cuda.new_event(device_id)
                except CudaError as error:
                    end_if_lost(error)
                    raise Unavailable(f"GPU {device_id} cannot be used: {error}") from None
            return self._opened

    def select(self) -> None:
        """Open the device, and make it the current one of this thread: libraries of a model begin with it.

        Raises `Unavailable`.
        """
        self.open()
        try:
            self.cuda.use(self.device_id)
        except CudaError as error:
            end_if_lost(error)
            raise Unavailable(f"GPU {self.device_id} cannot be used: {error}") from None
        self._thread.entered = True

    def _enter(self) -> None:
        """In a thread that uses the device for the first time: no context of GPU 0 is made (`Cuda.enter`)."""
        try:
            self.cuda.enter(self.device_id)
        except CudaError as error:
            self._failed("it cannot be the current device of a thread", error)
        self._thread.entered = True

    @property
    def _stream(self) -> Any:
        if not self._thread.entered:
            self._enter()
        return (self._opened or self.open())[0]

    @property
    def _event(self) -> Any:
        return (self._opened or self.open())[1]

    @property
    def stream(self) -> int:
        """The address of the stream of the instance, a cudaStream_t."""
        return int(self._stream)

    # ---- memory ----------------------------------------------------------------------------------

    @property
    def pool_room(self) -> int:
        """How many more bytes may be kept between batches (`--cuda-memory-pool-byte-size`)."""
        return self._pool_byte_size - self.pooled_byte_size

    def pooled(self, byte_size: int) -> None:
        """`byte_size` more bytes are kept."""
        self.pooled_byte_size += byte_size
        self.on_pooled(self.pooled_byte_size)

    def allocate(self, byte_size: int) -> DeviceBlock:
        """Return new memory. Raises `InternalError` if there is none; it takes long, so keep the block."""
        self.open()
        try:
            return DeviceBlock(self.cuda, byte_size, self.device_id)
        except CudaError as error:
            self._failed(f"{byte_size} bytes of memory cannot be allocated", error)

    def upload(self, data: Buffer | Array, datatype: str, shape: Sequence[int]) -> DeviceArray:
        """Return a copy of host memory on the device, in memory of its own. It is there when the stream is."""
        if isinstance(data, np.ndarray):
            source: memoryview = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        else:
            source = memoryview(data).cast("B")
        block = self.allocate(len(source))
        if len(source):
            self.enqueue(block.address, address_of(source), len(source), (source, block))
        return DeviceArray(block.address, datatype, shape, self.device_id, block)

    def reserve(
        self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int], alignment: int = ALIGNMENT
    ) -> DeviceArray | None:
        """Return the final place of an output on this device, in the client's region or where another model reads it;
        None if it has no such place at a multiple of `alignment`.

        `respond` with it copies nothing. Kernels of libraries store vectors, which fails at other addresses with an
        error that ends the process (716, misaligned address); a client may name any offset of its region.
        """
        for output in request.ref.outputs:
            if output.name == name and output.on_device:
                return None if self.arenas is None else self.arenas.reserve(request, name, datatype, shape)
            if output.name == name and output.span is not None and not output.classification:
                region = self._regions.find(output.span.lease.region_number)
                byte_size = element_count(shape) * DATATYPES[datatype].byte_size
                memory = getattr(region, "device_memory", None)
                if memory is None or byte_size > output.span.byte_size:
                    return None
                opened = memory()
                if opened.device_id != self.device_id or (opened.address + output.span.offset) % alignment:
                    return None
                return DeviceArray(opened.address + output.span.offset, datatype, shape, self.device_id, opened)
        return None

    # ---- batches ---------------------------------------------------------------------------------

    def gather(
        self,
        requests: Sequence[WorkerRequest],
        specs: Mapping[str, TensorShapes],
        alignment: int = ALIGNMENT,
        computed: Mapping[str, tuple[str, Array]] | None = None,
    ) -> dict[str, DeviceArray]:
        """Return name → the rows of all requests, on the device when the stream has done what is enqueued now.

        As `backends.batch_tensors.gather`, but BYTES are left out. Valid until the next call. The input of a batch of
        one that is on this device, at a multiple of `alignment`, is used where it is; all else is copied into one block
        of this object, also `computed`: inputs that the worker makes, name → datatype and elements. Raises
        `InternalError` or `InvalidArgument`.
        """
        parts = gathered(requests, specs)
        parts.update((name, (datatype, [array])) for name, (datatype, array) in (computed or {}).items())
        found: dict[str, DeviceArray] = {}
        copied = []
        for name, (datatype, pieces) in parts.items():
            first = pieces[0]
            if (
                len(pieces) == 1
                and isinstance(first, DeviceArray)
                and first.device_id == self.device_id
                and first.address % alignment == 0
            ):
                found[name] = first
            else:
                copied.append((name, datatype, pieces))
        if copied:
            found.update(self._batch.staging.fill(copied, alignment))
        return found

    def begin_overlapping(self) -> None:
        """Let what is enqueued from now on be a batch beside the one before, until `end_overlapping`.

        At most two batches are in flight: the one before that has finished. Nothing else may be pending.
        """
        with self._lock:
            assert not self.pending, "a batch begins while another one is enqueued"
            if self._copy_streams is None:
                self.open()
                try:
                    self._copy_streams = self.cuda.new_stream(self.device_id), self.cuda.new_stream(self.device_id)
                except CudaError as error:
                    self._failed("streams cannot be made", error)
                self._other = BatchOnDevice(self, self._limits)
            assert self._other is not None
            self._batch, self._other = self._other, self._batch
            self.block_set = 1 - self.block_set
            self._overlaps, self._copies_in_order = True, False

    def end_overlapping(self) -> EnqueuedBatch:
        """Enqueue what is left of the batch, and return it. The caller waits for it in a thread, and finishes it."""
        with self._lock:
            batch = self._batch
            try:
                distribute = batch.small_outputs.enqueue(self._copy_from_device)
                stream = self.output_stream() if batch.copies_out else self._stream
                ended = batch.events[2]
                self.cuda.record(ended, stream)
            except CudaError as error:
                self._failed("the end of a batch cannot be marked", error)
            kept, batch.kept = batch.kept, []
            self.pending = self._overlaps = False

        def wait() -> None:
            if not self._thread.entered:
                self._enter()
            try:
                self.cuda.wait_for(ended)
            except CudaError as error:
                self._failed("what was computed cannot be waited for", error)

        def finish() -> Stages:
            if distribute is not None:
                distribute()
            kept.clear()
            try:
                return batch.stages()
            except CudaError as error:
                self._failed("the times of a batch cannot be read", error)

        return EnqueuedBatch(wait, finish)

    def keeps_outputs_in_order(self) -> None:
        """Note that the outputs of this batch are in memory that the next one changes: they are copied before that."""
        self._copies_in_order = True

    # ---- the stream ------------------------------------------------------------------------------

    def enqueue(
        self,
        target: int,
        source: int,
        byte_size: int,
        kept: object = None,
        *,
        crosses: bool = True,
        stage: CopyStage = CopyStage.COMPUTATION,
    ) -> None:
        """Copy between any two addresses when it is the stream's turn. `kept` is referred to until then.

        A copy that `crosses` between host and device, or between devices, counts in `copies`. `stage` is what the copy
        belongs to: of inputs nothing may be computed before `inputs_enqueued`, and outputs are copied after all that
        is computed (`computes`).
        """
        with self._lock:
            try:
                stream = self._stream_of(stage)
                if crosses and self.pinning is not None:
                    self._enqueue_pieces(self.pinning, target, source, byte_size, stream)
                else:
                    self.cuda.enqueue_copy(target, source, byte_size, stream)
            except CudaError as error:
                self._failed("a copy has failed", error)
            self.pending = True
            if crosses:
                self.copies += 1
                self.copied_byte_size += byte_size
            if kept is not None:
                self._batch.kept.append(kept)

    def _stream_of(self, stage: CopyStage) -> Any:
        """Return the stream for copies of a stage. Raises `CudaError`."""
        if stage is CopyStage.OUTPUT:
            return self.output_stream()
        if stage is CopyStage.INPUT and self._overlaps:
            assert self._copy_streams is not None
            return self._copy_streams[0]
        return self._stream

    def output_stream(self) -> Any:
        """Return the stream for copies of outputs, which waits for all that is computed. Raises `CudaError`."""
        stream, batch = self._stream, self._batch
        target = stream
        if self._overlaps and not self._copies_in_order:
            assert self._copy_streams is not None
            target = self._copy_streams[1]
        elif not (self.timed or self._overlaps):
            return stream
        if not batch.is_marked:
            computed = batch.events[1]
            if target is stream:
                self.cuda.record(computed, stream)
            else:
                self.cuda.order(stream, computed, target)
            batch.is_marked = True
        batch.copies_out = True
        return target

    def inputs_enqueued(self) -> None:
        """Let what is computed from now on wait for the copies of inputs that are enqueued."""
        if not (self._overlaps or self.timed):
            return
        with self._lock:
            batch = self._batch
            try:
                if self._overlaps:
                    self.cuda.order(self._stream_of(CopyStage.INPUT), batch.events[0], self._stream)
                else:
                    self.cuda.record(batch.events[0], self._stream)
            except CudaError as error:
                self._failed("streams cannot be put into order", error)
            batch.copies_in = True

    def _enqueue_pieces(self, pinning: HostPinning, target: int, source: int, byte_size: int, stream: Any) -> None:
        """Enqueue a copy, in pieces where only a part of the memory of the host is pinned. Raises `CudaError`."""
        while byte_size:
            piece = min(pinning.reach(target, byte_size), pinning.reach(source, byte_size))
            self.cuda.enqueue_copy(target, source, piece, stream)
            target, source, byte_size = target + piece, source + piece, byte_size - piece

    def keep(self, memory: object) -> None:
        """Refer to what something that was enqueued reads or writes, until it is waited for."""
        with self._lock:
            self.pending = True
            self._batch.kept.append(memory)

    def after(self, stream: int) -> None:
        """Let the instance's stream wait for all that is enqueued on another one of this device now.

        0 is the default stream.
        """
        with self._lock:
            try:
                with self._current(stream):
                    self.cuda.order(self.cuda.stream_of(stream), self._event, self._stream)
            except CudaError as error:
                self._failed("streams cannot be put into order", error)
            self.pending = True

    def before(self, stream: int) -> None:
        """Let another stream of this device wait for all that is enqueued on the instance's stream now."""
        with self._lock:
            try:
                with self._current(stream):
                    self.cuda.order(self._stream, self._event, self.cuda.stream_of(stream))
            except CudaError as error:
                self._failed("streams cannot be put into order", error)

    def _current(self, stream: int) -> contextlib.AbstractContextManager[None]:
        """Make the device the thread's current one if `stream` is a default stream, whose handle means the stream of
        the current device: a thread that a model has made begins with device 0."""
        return self.cuda.on(self.device_id) if stream in DEFAULT_STREAMS else _NOTHING

    def synchronize(self) -> None:
        """Wait for all that is enqueued, with a processor that is free for others unless the last wait was short.

        While batches overlap: for all of the batch that is enqueued now. The process ends if the device is lost.
        """
        if not self._thread.entered:
            self._enter()
        with self._lock:
            batch = self._batch
            distribute = batch.small_outputs.enqueue(self._copy_from_device)
            kept, batch.kept = batch.kept, []
            started_ns = time.monotonic_ns()
            try:
                stream = self.output_stream() if self._overlaps and batch.copies_out else self._stream
                event = batch.events[2] if self.timed else self._event
                self.cuda.wait(stream, event, self.poll_ns if self._waited_ns < self.poll_ns else 0)
                self.stages = batch.stages() if self.timed and not self._overlaps else None
            except CudaError as error:
                self._failed("what was computed cannot be waited for", error)
            self._waited_ns = time.monotonic_ns() - started_ns
            if distribute is not None:
                distribute()
            self.pending = False  # only now: a thread that reads it without the lock may send a response then
        del kept

    def _copy_from_device(self, target: int, source: int, byte_size: int) -> None:
        """Enqueue a copy to memory of the host that is pinned as a whole, or not at all. The lock is held."""
        try:
            self.cuda.enqueue_copy(target, source, byte_size, self.output_stream())
        except CudaError as error:
            self._failed("a copy has failed", error)
        self.copies += 1
        self.copied_byte_size += byte_size

    def fetch(self, array: DeviceArray, data: bytearray) -> None:
        """Let `data` have the elements after the next wait: small outputs are fetched together."""
        with self._lock:
            self.pending = True
            if self._batch.small_outputs.add(array, data):
                return
        self.copy_to(array, memoryview(data))

    def finish_readers(self, streams: Iterable[int]) -> None:
        """Wait until libraries that were given memory on these streams read it no more.

        A stream may be gone meanwhile, unless it is the legacy default one (0 and 1, as `__dlpack__` numbers it): then
        all streams of the device are waited for.
        """
        if all(stream in (0, 1) for stream in streams):
            self.after(1)
        else:
            try:
                self.cuda.use(self.device_id)
                self.cuda.wait_for_all()
            except CudaError as error:
                self._failed("what libraries compute cannot be waited for", error)
        self.synchronize()

    def computes(self) -> None:
        """Note that the backend has enqueued what computes an output."""
        with self._lock:
            self.pending = True
            self._batch.is_marked = False

    def unpin(self, address: int) -> None:
        """Unpin memory of the host (`Cuda.unpin`) after all copies from and to it. Raises `CudaError`.

        It waits twice, so that other threads wait only for what they have enqueued in between.
        """
        self.cuda.wait_for_all()
        with self._lock:
            self.cuda.wait_for_all()
            self.cuda.unpin(address)

    def close(self) -> None:
        """Free what the system would free with the process, for a process that continues. Nothing may be enqueued."""
        if self.pinning is not None:
            self.pinning.close()
            self.pinning = None
        if self._opened is None:
            return
        try:
            self.cuda.use(self.device_id)
            self.cuda.wait_for_all()
            for batch in (self._batch, self._other):
                if batch is not None:
                    batch.close()
            stream, event = self._opened
            self.cuda.destroy([stream, *(self._copy_streams or ())], [event])
        except CudaError as error:
            end_if_lost(error)
            logger.warning("memory of an instance on GPU %d was not freed: %s", self.device_id, error)

    def copy_to(self, array: DeviceArray, target: memoryview) -> None:
        """Copy the elements to memory of the host when it is the stream's turn; `target` is kept until then."""
        if len(target):
            address = address_of(target)
            if self.pinning is not None:
                self.pinning.used(address, len(target))
            self.enqueue(address, array.address, len(target), (target, array.owner), stage=CopyStage.OUTPUT)

    def to_host(self, array: DeviceArray) -> Array:
        """Return a copy on the host, which is complete. BF16 becomes UINT16."""
        dtype = NUMPY_TYPES["UINT16" if array.datatype == "BF16" else array.datatype]
        copy = np.empty(array.shape, dtype)
        if copy.nbytes:
            self.copy_to(array, copy.reshape(-1).view(np.uint8).data)
        self.synchronize()
        return copy

    def _failed(self, what: str, error: CudaError) -> NoReturn:
        end_if_lost(error)
        raise InternalError(f"GPU {self.device_id}: {what}: {error}") from None


def end_if_lost(error: CudaError) -> None:
    """End the process if it cannot use the device any more: the kernel replaces it."""
    if error.is_sticky:
        sys.stderr.write(f"the device is lost, and the worker ends: {error}\n")
        sys.stderr.flush()
        os._exit(LOST_DEVICE_EXIT_CODE)
