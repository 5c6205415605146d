"""Registered regions: bounds, names, and unregistering while in use. Texts are Triton's."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.errors import (
    InternalError,
    InvalidArgument,
    NoDescriptorLeft,
    NotFound,
    RegionExists,
    RegionNotFound,
)
from kernel.memory.client_regions import RegionRegistry
from shm.region import RegionKind
from shm.tensor import ClientSpan

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def key() -> Iterator[str]:
    path = Path("/dev/shm", f"naiad_test_{uuid.uuid4().hex}")
    path.write_bytes(bytes(4096))
    yield f"/{path.name}"
    path.unlink(missing_ok=True)


@pytest.fixture
def registry() -> Iterator[RegionRegistry]:
    made = RegionRegistry()
    yield made
    made.close()


def test_a_range_of_a_registered_region_can_be_leased(registry: RegionRegistry, key: str) -> None:
    registry.register_system("r", key, 0, 4096)
    span = registry.lease(ClientSpan("r", byte_size=96, offset=4000))
    assert (span.offset, span.byte_size, span.lease.region.name) == (4000, 96, "r")
    span.lease.release()


@pytest.mark.parametrize(("offset", "byte_size"), [(0, 4097), (4096, 1), (1, 4096), (0, 0), (-1, 1), (2**63, 2**63)])
def test_a_registration_must_lie_in_the_object(registry: RegionRegistry, key: str, offset: int, byte_size: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidArgument, match="^failed to register shared memory region 'r': invalid args$"):
        registry.register_system("r", key, offset, byte_size)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("offset", "byte_size", "text"),
    [
        (4096, 1, "Invalid offset for shared memory region: 'r'"),
        (4095, 2, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, 2**63, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, 2**64 - 1, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, 0, "Invalid offset + byte size for shared memory region: 'r'"),
        (32, 2**64 - 32, "Integer overflow detected"),
    ],
)
def test_a_lease_must_lie_in_the_region(
    registry: RegionRegistry, key: str, offset: int, byte_size: int, text: str
) -> None:
    registry.register_system("r", key, 0, 4096)
    with pytest.raises(InvalidArgument) as caught:
        registry.lease(ClientSpan("r", byte_size, offset))
    assert caught.value.message.startswith(text)


def test_names_and_keys_are_checked(registry: RegionRegistry, key: str) -> None:
    registry.register_system("r", key, 0, 64)
    with pytest.raises(RegionExists, match="^shared memory region 'r' already in manager$"):
        registry.register_system("r", key, 0, 64)
    with pytest.raises(InternalError, match="^Unable to open shared memory region: '/no_such_key'$"):
        registry.register_system("s", "/no_such_key", 0, 64)
    with pytest.raises(InvalidArgument, match="invalid shm key '/'"):
        registry.register_system("s", "/", 0, 64)
    with pytest.raises(InvalidArgument, match="reserved prefix"):
        registry.register_system("s", "//triton_python_backend_shm_region_1", 0, 64)
    with pytest.raises(RegionNotFound, match="^Unable to find shared memory region: 's'$"):
        registry.lease(ClientSpan("s", 1))


def test_a_region_that_is_unregistered_while_in_use_stays_listed_and_usable_until_its_last_use_ends(
    registry: RegionRegistry, key: str
) -> None:
    registry.register_system("r", key, 0, 64)
    first = registry.lease(ClientSpan("r", 64))
    [region] = registry.status(RegionKind.SYSTEM)
    registry.unregister(RegionKind.SYSTEM, "r")
    registry.unregister(RegionKind.SYSTEM)
    assert registry.status(RegionKind.SYSTEM, "r") == [region]
    with pytest.raises(RegionExists):
        registry.register_system("r", key, 0, 64)
    second = registry.lease(ClientSpan("r", 64))
    first.lease.release()
    assert registry.status(RegionKind.SYSTEM) == [region], "the second request uses it"
    assert not region.closed
    second.lease.release()
    assert region.closed
    assert registry.status(RegionKind.SYSTEM) == []
    with pytest.raises(RegionNotFound):
        registry.lease(ClientSpan("r", 64))
    registry.register_system("r", key, 0, 64)
    assert registry.status(RegionKind.SYSTEM) != [region]


def test_a_region_that_is_used_again_after_it_was_unregistered_goes_only_once(
    registry: RegionRegistry, key: str
) -> None:
    registry.register_system("r", key, 0, 64)
    span = registry.lease(ClientSpan("r", 64))
    registry.unregister(RegionKind.SYSTEM, "r")
    registry.unregister(RegionKind.SYSTEM, "r")
    span.lease.release()
    registry.register_system("r", key, 0, 64)
    [new] = registry.status(RegionKind.SYSTEM)
    assert not new.closed


def test_closing_forgets_regions_in_use_and_closes_them_after_their_last_use(
    registry: RegionRegistry, key: str
) -> None:
    registry.register_system("r", key, 0, 64)
    span = registry.lease(ClientSpan("r", 64))
    registry.close()
    assert registry.status(RegionKind.SYSTEM) == []
    assert not span.lease.region.closed
    span.lease.release()
    assert span.lease.region.closed


def test_unregistering_what_is_not_there_is_no_error(registry: RegionRegistry) -> None:
    registry.unregister(RegionKind.SYSTEM, "r")
    registry.unregister(RegionKind.CUDA)


def test_a_region_that_its_owner_shortened_is_not_used(registry: RegionRegistry, key: str) -> None:
    registry.register_system("r", key, 0, 4096)
    os.truncate(f"/dev/shm{key}", 100)
    with pytest.raises(InvalidArgument, match="was truncated by its owner$"):
        registry.lease(ClientSpan("r", 64))


def test_status_lists_regions_by_name_and_kind(registry: RegionRegistry, key: str) -> None:
    for name in ("b", "a"):
        registry.register_system(name, key, 0, 64)
    assert [region.name for region in registry.status(RegionKind.SYSTEM)] == ["a", "b"]
    assert registry.status(RegionKind.CUDA) == []
    with pytest.raises(NotFound, match="^Unable to find system shared memory region: 'c'$"):
        registry.status(RegionKind.SYSTEM, "c")
    with pytest.raises(NotFound, match="is registered as system shared memory, not CUDA shared memory$"):
        registry.status(RegionKind.CUDA, "a")


def test_device_memory_is_refused_where_there_is_no_gpu(registry: RegionRegistry) -> None:
    with pytest.raises(InvalidArgument, match="GPUs not supported$"):
        registry.register_cuda("c", bytes(64), 0, 64)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_region_whose_descriptor_is_kept_for_workers_is_refused(
    registry: RegionRegistry, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setattr("kernel.memory.client_regions.is_reserved", lambda fd: True)
    with pytest.raises(NoDescriptorLeft):
        registry.register_system("r", key, 0, 4096)
    assert registry.status(RegionKind.SYSTEM) == []
    assert open_descriptors() == before


def test_without_any_descriptor_registering_says_so(
    registry: RegionRegistry, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("shm.posix.os.open", fail)
    with pytest.raises(NoDescriptorLeft):
        registry.register_system("r", key, 0, 4096)
