"""Regions in memory of a CUDA device, of clients and of other workers. Models that compute on the host get copies.

A handle is opened once, when a request first uses the region. It is closed when the region has gone and nothing refers
to its memory any more: a model may keep a tensor longer than its request lasts.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, NoReturn

from backends.worker.devices.instance_device import end_if_lost
from backends.worker.memory import CopyingRegion
from kernel.errors import InvalidArgument
from shm.cuda import TOO_SMALL, UNAVAILABLE, CudaError, CudaUnavailable, DeviceMemory, cuda

if TYPE_CHECKING:
    from backends.worker.devices.instance_device import DeviceBlock
    from backends.worker.memory import CopyBuffers
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
