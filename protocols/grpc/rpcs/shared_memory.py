"""Shared memory that gRPC clients register, list and forget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.grpc.generated import grpc_service_pb2 as pb
from shm.region import RegionKind

if TYPE_CHECKING:
    from kernel.serving.front_doors.interface import KernelInterface
    from protocols.grpc.rpc import Caller


class SharedMemoryRpcs:
    """System and CUDA regions. Whether a caller may change them is the kernel's setting; so is which it may list."""

    def __init__(self, kernel: KernelInterface) -> None:
        self._kernel = kernel

    async def system_status(
        self, message: pb.SystemSharedMemoryStatusRequest, caller: Caller
    ) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._kernel.regions.status(RegionKind.SYSTEM, message.name, caller.identity):
            entry = response.regions[region.name]
            entry.name, entry.key = region.name, region.key
            entry.offset, entry.byte_size = region.offset, region.byte_size
        return response

    async def system_register(
        self, message: pb.SystemSharedMemoryRegisterRequest, caller: Caller
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._kernel.check_client_shm(local_peer=caller.local)
        self._kernel.regions.register_system(
            message.name, message.key, message.offset, message.byte_size, caller.identity
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_unregister(
        self, message: pb.SystemSharedMemoryUnregisterRequest, caller: Caller
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Forget a region, or all for an empty name."""
        self._kernel.check_client_shm(local_peer=caller.local)
        self._kernel.regions.unregister(RegionKind.SYSTEM, message.name, caller.identity)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(
        self, message: pb.CudaSharedMemoryStatusRequest, caller: Caller
    ) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._kernel.regions.status(RegionKind.CUDA, message.name, caller.identity):
            entry = response.regions[region.name]
            entry.name, entry.device_id, entry.byte_size = region.name, region.device_id, region.byte_size
        return response

    async def cuda_register(
        self, message: pb.CudaSharedMemoryRegisterRequest, caller: Caller
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._kernel.check_client_shm(local_peer=caller.local)
        await self._kernel.regions.register_cuda(
            message.name, message.raw_handle, message.device_id, message.byte_size, caller.identity
        )
        return pb.CudaSharedMemoryRegisterResponse()

    async def cuda_unregister(
        self, message: pb.CudaSharedMemoryUnregisterRequest, caller: Caller
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Forget a region, or all for an empty name."""
        self._kernel.check_client_shm(local_peer=caller.local)
        self._kernel.regions.unregister(RegionKind.CUDA, message.name, caller.identity)
        return pb.CudaSharedMemoryUnregisterResponse()
