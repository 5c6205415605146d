"""Registered regions: bounds, names, and unregistering while in use. Texts are Triton's.

Users who shorten their memory are distrusted for a time.

Names of regions, shared or of each client, and how many each client has.
"""

from __future__ import annotations

import asyncio
import errno
import os
import types
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.errors import (
    ArenaFull,
    InternalError,
    InvalidArgument,
    NoDescriptorLeft,
    NotFound,
    RegionExists,
    RegionNotFound,
)
from kernel.memory.client_regions import DISTRUST_NS, DistrustedUsers, RegionRegistry, RegionTables
from shm.blocks import ByteBudget
from shm.region import FileHandle, Region, RegionKind
from shm.tensor import ClientSpan
from tests.open_descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.observe.limited_log import LimitedLog


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
    before = open_descriptors()
    with pytest.raises(InvalidArgument, match="^failed to register shared memory region 'r': invalid args$"):
        registry.register_system("r", key, offset, byte_size)
    assert open_descriptors() <= before


@pytest.mark.parametrize(
    ("offset", "byte_size", "text"),
    [
        (4096, 1, "Invalid offset for shared memory region: 'r'"),
        (4095, 2, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, 2**63, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, 2**64 - 1, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, 0, "Invalid offset + byte size for shared memory region: 'r'"),
        (32, 2**64 - 32, "Integer overflow detected"),
        (2**64 - 32, 64, "Invalid offset for shared memory region: 'r'"),
        (-1, 64, "Invalid offset for shared memory region: 'r'"),
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
        asyncio.run(registry.register_cuda("c", bytes(64), 0, 64))


def test_a_region_whose_descriptor_is_kept_for_workers_is_refused(
    registry: RegionRegistry, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setattr("kernel.memory.client_regions.is_reserved", lambda fd: True)
    with pytest.raises(NoDescriptorLeft):
        registry.register_system("r", key, 0, 4096)
    assert registry.status(RegionKind.SYSTEM) == []
    assert open_descriptors() <= before


def test_without_any_descriptor_registering_says_so(
    registry: RegionRegistry, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("shm.region.os.open", fail)
    with pytest.raises(NoDescriptorLeft):
        registry.register_system("r", key, 0, 4096)


# ---- regions that are shortened -----------------------------------------------------------------


def files(count: int) -> list[Path]:
    made = [Path("/dev/shm", f"naiad_test_{uuid.uuid4().hex}") for _ in range(count)]
    for path in made:
        path.write_bytes(bytes(4096))
    return made


@pytest.fixture
def shared_files() -> Iterator[list[Path]]:
    made = files(3)
    yield made
    for path in made:
        path.unlink()


class Shortened:
    """A registry with the regions `0`, `1` and `2`, and a clock."""

    def __init__(self, paths: list[Path], budget: ByteBudget | None = None) -> None:
        self.now_ns = 0
        self.paths = paths
        self.registry = RegionRegistry(now_ns=lambda: self.now_ns, budget=budget)
        for number in range(3):
            self.register(number)

    def register(self, number: int) -> Region:
        self.registry.register_system(str(number), f"/{self.paths[number].name}", 0, 4096)
        [region] = self.registry.status(RegionKind.SYSTEM, str(number))
        return region

    @property
    def copied(self) -> dict[str, bool]:
        return {region.name: region.copied for region in self.registry.status(RegionKind.SYSTEM)}


def test_a_region_that_is_found_shortened_is_removed_and_others_of_its_user_are_copied(
    shared_files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    lab = Shortened(shared_files)
    assert lab.copied == {"0": False, "1": False, "2": False}
    os.truncate(shared_files[0], 100)
    with pytest.raises(InvalidArgument, match="^shared memory region '0' was truncated by its owner$"):
        lab.registry.lease(ClientSpan("0", 64))
    with pytest.raises(RegionNotFound, match="^Unable to find shared memory region: '0'$"):
        lab.registry.lease(ClientSpan("0", 64))
    assert lab.copied == {"1": True, "2": True}
    assert f"the regions of user {os.getuid()} are copied" in caplog.text
    os.truncate(shared_files[0], 4096)
    assert lab.register(0).copied
    lab.now_ns += DISTRUST_NS
    lab.registry.unregister(RegionKind.SYSTEM)
    assert not lab.register(0).copied, "it is forgiven after a time"
    lab.registry.close()


def test_a_client_that_shortens_regions_again_and_again_is_logged_a_few_times(
    shared_files: list[Path], caplog: pytest.LogCaptureFixture, log_two_lines: Callable[[str], LimitedLog]
) -> None:
    log_two_lines("kernel.memory.client_regions._shortened")
    lab = Shortened(shared_files)
    for _ in range(5):
        os.truncate(shared_files[0], 100)
        with pytest.raises(InvalidArgument, match="was truncated by its owner$"):
            lab.registry.lease(ClientSpan("0", 64))
        os.truncate(shared_files[0], 4096)
        lab.register(0)
    assert caplog.text.count("shared memory region '0' was truncated by its owner and is removed") == 2
    lab.registry.close()


def test_after_a_bus_error_regions_that_are_shorter_are_the_cause(shared_files: list[Path]) -> None:
    lab = Shortened(shared_files)
    regions = lab.registry.status(RegionKind.SYSTEM)
    waiting = regions[0].lease()
    os.truncate(shared_files[0], 0)
    assert regions[1].on_fault is not None
    regions[1].on_fault(regions, regions[1:])
    assert lab.copied == {"1": True, "2": True}
    assert regions[0].copied, "a request that waits is not executed on a mapping either"
    waiting.release()
    assert regions[0].closed
    lab.registry.close()


def test_after_a_bus_error_without_a_shorter_region_those_in_use_are_suspects(
    shared_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their owner has lengthened it again. Regions of other users are not touched."""
    lab = Shortened(shared_files)
    first, second, third = regions = lab.registry.status(RegionKind.SYSTEM)
    stat = os.fstat
    users = {first.fd: 1, second.fd: 2, third.fd: 2}

    def of_user(fd: int) -> object:
        found = stat(fd)
        return types.SimpleNamespace(st_uid=users.get(fd, found.st_uid), st_size=found.st_size)

    monkeypatch.setattr("kernel.memory.client_regions.os.fstat", of_user)
    assert first.on_fault is not None
    first.on_fault(regions, [second])
    assert lab.copied == {"0": False, "1": True, "2": True}
    first.on_fault(regions, [])
    assert lab.copied == {"0": True, "1": True, "2": True}
    lab.registry.close()


def test_copies_count_in_the_budget_until_their_use_ends(shared_files: list[Path]) -> None:
    budget = ByteBudget(100)
    lab = Shortened(shared_files, budget)
    [region] = lab.registry.status(RegionKind.SYSTEM, "0")
    mapped = lab.registry.lease(ClientSpan("0", 1000))
    assert budget.used_byte_size == 0
    region.copy_from_now_on()
    first = lab.registry.lease(ClientSpan("0", 60))
    shared = first.lease.share()
    assert (budget.used_byte_size, region.lease_count) == (60, 3)
    with pytest.raises(ArenaFull):
        lab.registry.lease(ClientSpan("0", 60))
    for lease in (first.lease, first.lease, shared, mapped.lease):
        lease.release()
    assert (budget.used_byte_size, region.lease_count) == (0, 0)
    lab.registry.close()


# ---- clients ------------------------------------------------------------------------------------


def test_a_client_may_have_a_limited_number_of_regions_and_others_find_room(key: str) -> None:
    registry = RegionRegistry(per_peer_limit=2)
    for name in ("a", "b"):
        registry.register_system(name, key, 0, 64, "user 1")
    with pytest.raises(InvalidArgument, match=r"'c': this client has registered 2 regions.*regions-per-peer"):
        registry.register_system("c", key, 0, 64, "user 1")
    registry.register_system("c", key, 0, 64, "user 2")
    registry.unregister(RegionKind.SYSTEM, "a", "user 1")
    registry.register_system("d", key, 0, 64, "user 1")
    registry.close()


def test_all_clients_together_may_have_a_limited_number_of_regions(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.memory.client_regions.MAX_REGIONS", 2)
    registry = RegionRegistry(owned=True)
    registry.register_system("a", key, 0, 64, "user 1")
    registry.register_system("a", key, 0, 64, "user 2")
    with pytest.raises(InvalidArgument, match="2 regions are registered already"):
        registry.register_system("a", key, 0, 64, "user 3")
    registry.close()


def test_a_region_of_a_client_is_unknown_to_others(key: str) -> None:
    registry = RegionRegistry(owned=True)
    registry.register_system("r", key, 0, 4096, "user 1")
    wanted = ClientSpan("r", 64)
    registry.lease(wanted, "user 1").lease.release()
    with pytest.raises(RegionNotFound):
        registry.lease(wanted, "user 2")
    assert registry.status(RegionKind.SYSTEM, "", "user 2") == []
    with pytest.raises(NotFound):
        registry.status(RegionKind.SYSTEM, "r", "user 2")
    registry.unregister(RegionKind.SYSTEM, "r", "user 2")
    registry.unregister(RegionKind.SYSTEM, "", "user 2")
    assert len(registry.status(RegionKind.SYSTEM, "r", "user 1")) == 1
    registry.register_system("r", key, 64, 64, "user 2")
    [region] = registry.status(RegionKind.SYSTEM, "", "user 2")
    assert region.offset == 64
    registry.unregister(RegionKind.SYSTEM, "", "user 1")
    assert registry.status(RegionKind.SYSTEM, "", "user 1") == []
    assert registry.status(RegionKind.SYSTEM, "", "user 2") == [region]
    registry.close()


def test_a_user_is_distrusted_for_a_time_after_the_last_occasion() -> None:
    users = DistrustedUsers()
    assert not users.has(1000, 5)
    assert users.add(1000, 5)
    assert users.has(1000, 5)
    assert not users.has(1001, 5)
    assert not users.add(1000, 100), "it was distrusted already"
    assert users.has(1000, 99 + DISTRUST_NS)
    assert not users.has(1000, 100 + DISTRUST_NS)
    assert users.add(1000, 100 + DISTRUST_NS)


def region(name: str) -> Region:
    return Region(name, RegionKind.SYSTEM, FileHandle(-1), 64)


def test_shared_names_are_those_of_all_clients() -> None:
    tables = RegionTables(owned=False)
    mine, theirs = region("mine"), region("theirs")
    tables.add(mine, "a")
    tables.add(theirs, "b")
    for peer in ("a", "b", "c"):
        assert tables.names(peer) == {"mine": mine, "theirs": theirs}
    assert set(tables) == {mine, theirs}


def test_owned_names_are_those_of_one_client() -> None:
    tables = RegionTables(owned=True)
    mine, theirs = region("same"), region("same")
    tables.add(mine, "a")
    tables.add(theirs, "b")
    assert (tables.names("a"), tables.names("b"), tables.names("c")) == ({"same": mine}, {"same": theirs}, {})
    tables.remove(mine)
    assert (tables.names("a"), tables.names("b")) == ({}, {"same": theirs})
    assert list(tables) == [theirs]
    assert list(tables._tables) == ["", "b"], "clients that have no regions any more leave nothing"


@pytest.mark.parametrize("owned", [True, False])
def test_regions_are_counted_for_each_client_and_once(owned: bool) -> None:
    tables = RegionTables(owned=owned)
    first, second = region("first"), region("second")
    tables.add(first, "a")
    tables.add(second, "a")
    assert (len(tables), tables.count("a"), tables.count("b")) == (2, 2, 0)
    tables.remove(first)
    tables.remove(first)
    assert (len(tables), tables.count("a")) == (1, 1)
    tables.remove(second)
    assert (len(tables), tables.count("a"), tables._counts) == (0, 0, {})
