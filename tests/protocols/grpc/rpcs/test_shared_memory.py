import asyncio
import os
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kernel.errors import ClientSharedMemoryDisabled, InvalidArgument, NotFound, RegionExists
from protocols.access import Peer
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.rpc import Caller
from protocols.grpc.rpcs.admin import KernelRpcs
from tests.protocols.front_door_lab import FrontDoorLab

T = TypeVar("T")


class OneClient(Peer):
    """The client of all connections."""

    @property
    def identity(self) -> str:
        return "user 1000"


LOCAL, REMOTE = (Caller((address, 40000), {}, OneClient(None)) for address in ("127.0.0.1", "192.0.2.1"))


def done(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


@pytest.fixture
def key() -> Iterator[str]:
    """The key of a POSIX object of 64 bytes."""
    path = Path(f"/dev/shm/naiad_test_grpc_{os.getpid()}")
    path.write_bytes(bytes(64))
    yield f"/{path.name}"
    path.unlink()


@pytest.fixture
def lab() -> Iterator[FrontDoorLab]:
    lab = FrontDoorLab()
    yield lab
    lab.regions.close()


def registration(key: str) -> pb.SystemSharedMemoryRegisterRequest:
    return pb.SystemSharedMemoryRegisterRequest(name="r", key=key, offset=16, byte_size=32)


def test_a_region_is_registered_listed_and_unregistered(lab: FrontDoorLab, key: str) -> None:
    rpcs = KernelRpcs(lab.kernel)
    done(rpcs.system_shared_memory_register(registration(key), LOCAL))
    for name in ("", "r"):
        found = done(rpcs.system_shared_memory_status(pb.SystemSharedMemoryStatusRequest(name=name), REMOTE)).regions
        assert dict(found) == {
            "r": pb.SystemSharedMemoryStatusResponse.RegionStatus(name="r", key=key, offset=16, byte_size=32)
        }
    with pytest.raises(RegionExists):
        done(rpcs.system_shared_memory_register(registration(key), LOCAL))
    done(rpcs.system_shared_memory_unregister(pb.SystemSharedMemoryUnregisterRequest(name="other"), LOCAL))
    done(rpcs.system_shared_memory_unregister(pb.SystemSharedMemoryUnregisterRequest(), LOCAL))
    assert not done(rpcs.system_shared_memory_status(pb.SystemSharedMemoryStatusRequest(), LOCAL)).regions
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'r'"):
        done(rpcs.system_shared_memory_status(pb.SystemSharedMemoryStatusRequest(name="r"), LOCAL))


def test_a_caller_from_elsewhere_may_not_change_regions(lab: FrontDoorLab, key: str) -> None:
    rpcs = KernelRpcs(lab.kernel)
    calls: list[Coroutine[Any, Any, Any]] = [
        rpcs.system_shared_memory_register(registration(key), REMOTE),
        rpcs.system_shared_memory_unregister(pb.SystemSharedMemoryUnregisterRequest(), REMOTE),
        rpcs.cuda_shared_memory_register(pb.CudaSharedMemoryRegisterRequest(), REMOTE),
        rpcs.cuda_shared_memory_unregister(pb.CudaSharedMemoryUnregisterRequest(), REMOTE),
    ]
    for call in calls:
        with pytest.raises(ClientSharedMemoryDisabled):
            done(call)


def test_cuda_regions_are_refused_and_there_are_none(lab: FrontDoorLab) -> None:
    rpcs = KernelRpcs(lab.kernel)
    with pytest.raises(InvalidArgument, match="GPUs not supported"):
        done(rpcs.cuda_shared_memory_register(pb.CudaSharedMemoryRegisterRequest(name="r", byte_size=8), LOCAL))
    assert not done(rpcs.cuda_shared_memory_status(pb.CudaSharedMemoryStatusRequest(), LOCAL)).regions
    done(rpcs.cuda_shared_memory_unregister(pb.CudaSharedMemoryUnregisterRequest(), LOCAL))
