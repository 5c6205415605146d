"""Regions in memory of a CUDA device, for models that compute on the host: inputs and outputs are copied.

A handle is opened once, when a request first uses the region, and closed with the region.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from backends.worker.memory import CopyingRegion
from kernel.errors import InvalidArgument
from shm.cuda import TOO_SMALL, UNAVAILABLE, CudaError, CudaUnavailable, cuda

if TYPE_CHECKING:
    from backends.worker.memory import CopyBuffers
    from shm.cuda import Cuda, DeviceMemory
    from shm.tensor import Buffer

logger = logging.getLogger(__name__)

#: The exit code of a worker that has lost its device.
LOST_DEVICE_EXIT_CODE = 70


class DeviceRegion(CopyingRegion):
    """A client's region on a device."""

    def __init__(self, handle: bytes, byte_size: int, device_id: int, buffers: CopyBuffers) -> None:
        """Copies are made in `buffers`."""
        self.number = 0
        self._handle = handle
        self._byte_size = byte_size
        self._device_id = device_id
        self._buffers = buffers
        self._memory: DeviceMemory | None = None

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes at `offset`. Raises `InvalidArgument`."""
        devices, source = self._opened()
        try:
            devices.copy_to_host(source, offset, memory)
        except CudaError as error:
            _failed("read", error)

    def write_from(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`. Raises `InvalidArgument`."""
        devices, target = self._opened()
        try:
            devices.copy_from_host(target, offset, data)
        except CudaError as error:
            _failed("written", error)

    def _opened(self) -> tuple[Cuda, DeviceMemory]:
        """Return the devices, and the memory after it was opened. Raises `InvalidArgument`."""
        try:
            devices = cuda()
        except CudaUnavailable as error:
            raise InvalidArgument(f"{UNAVAILABLE}{error}") from None
        if self._memory is None:
            try:
                memory = devices.open_handle(self._handle, self._device_id)
            except ValueError as error:
                raise InvalidArgument(str(error)) from None
            except CudaError as error:
                _failed("opened", error)
            if memory.byte_size < self._byte_size:
                devices.close_handle(memory)
                raise InvalidArgument(
                    f"{TOO_SMALL}{memory.byte_size} bytes, and the region was registered with {self._byte_size}"
                )
            self._memory = memory
        return devices, self._memory

    def close(self) -> None:
        """See `WorkerRegion`."""
        memory, self._memory = self._memory, None
        if memory is not None:
            try:
                cuda().close_handle(memory)
            except CudaError as error:  # the exporter has ended, perhaps: nothing is left to close
                logger.debug("a CUDA region could not be closed: %s", error)


def _failed(what: str, error: CudaError) -> NoReturn:
    """Raise `InvalidArgument`, or end the process if it cannot use the device any more: it is replaced."""
    if error.is_sticky:
        sys.stderr.write(f"the device is lost, and the worker ends: {error}\n")
        sys.stderr.flush()
        os._exit(LOST_DEVICE_EXIT_CODE)
    reason = f": {error.reason}" if error.reason else ""
    raise InvalidArgument(f"a CUDA shared memory region cannot be {what}: {error}{reason}") from None
