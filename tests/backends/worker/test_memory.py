"""Regions of a worker: what a model changes in them is seen by those who may see it, and by nobody else."""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.worker import memory
from backends.worker.memory import AttachedRegion, AttachedRegions, CopiedRegion, CopyBuffers, UnmappedRegion
from kernel.errors import InternalError, InvalidArgument
from tests.backends.worker.regions import attached_region
from tests.open_descriptors import descriptors_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = mmap.PAGESIZE


class SharedFile:
    """A memfd of some pages, in which byte n of a page is `number` of the page, and regions over it."""

    def __init__(self, pages: int = 4) -> None:
        self.fd = os.memfd_create("test")
        for number in range(pages):
            self.fill(number, number)
        self.byte_size = pages * PAGE
        self.regions: list[AttachedRegion | UnmappedRegion] = []

    def fill(self, page: int, value: int) -> None:
        """Write as the process does that allocates in the arena."""
        os.pwrite(self.fd, bytes([value]) * PAGE, page * PAGE)

    def byte(self, offset: int) -> int:
        return os.pread(self.fd, 1, offset)[0]

    def region(self, *, offset: int = 0, writable: bool = False, volatile: bool = False) -> AttachedRegion:
        fd = os.dup(self.fd)
        made = AttachedRegion(fd, self.byte_size - offset, offset, writable=writable, volatile=volatile)
        self.regions.append(made)
        return made

    def close(self) -> None:
        for region in self.regions:
            region.close()
        os.close(self.fd)


@pytest.fixture
def file() -> Iterator[SharedFile]:
    made = SharedFile()
    yield made
    made.close()


@pytest.fixture
def large_file() -> Iterator[SharedFile]:
    """A file of which half is a large input."""
    made = SharedFile(40)
    yield made
    made.close()


# ---- private mappings -----------------------------------------------------------------------


def test_a_change_of_an_input_is_seen_by_its_model_alone(file: SharedFile) -> None:
    region, other = file.region(), file.region()
    mine = region.input_view(0, PAGE)
    theirs = other.input_view(0, PAGE)
    mine[0] = 99
    assert mine[0] == 99
    assert theirs[0] == file.byte(0) == 0


def test_the_next_input_at_the_same_place_is_what_its_producer_wrote(file: SharedFile) -> None:
    region = file.region()
    first = region.input_view(0, PAGE)
    first[:] = bytes([99]) * PAGE
    region.ended(0, PAGE)
    file.fill(0, 7)
    assert bytes(region.input_view(0, PAGE)) == bytes([7]) * PAGE


def test_all_pages_of_an_input_are_renewed_and_no_others(file: SharedFile) -> None:
    region = file.region()
    kept = region.input_view(0, 100)
    ended = region.input_view(PAGE + 10, PAGE)  # in two pages
    kept[0], ended[0], ended[PAGE - 1] = 91, 92, 93
    region.ended(PAGE + 10, PAGE)
    for page in range(4):
        file.fill(page, 7)
    assert kept[0] == 91, "this request goes on, with its change"
    again = region.input_view(PAGE, 2 * PAGE)
    assert bytes(again) == bytes([7]) * 2 * PAGE


def address_of(view: memoryview) -> int:
    address: int = np.asarray(view).__array_interface__["data"][0]
    return address


def is_mapped(address: int) -> bool:
    """Whether the page at `address` can be read without a fault."""
    with open("/proc/self/pagemap", "rb") as entries:
        entries.seek(8 * (address // PAGE))
        return int.from_bytes(entries.read(8), "little") >> 63 == 1


def test_pages_of_a_large_input_stay_mapped_and_show_what_its_producer_writes_next(large_file: SharedFile) -> None:
    region = large_file.region()
    view = region.input_view(0, 20 * PAGE)
    assert bytes(view[::PAGE]) == bytes(range(20))
    region.ended(0, 20 * PAGE)
    assert all(is_mapped(address_of(view) + page * PAGE) for page in range(20))
    large_file.fill(7, 77)
    assert region.input_view(0, 20 * PAGE)[7 * PAGE] == 77


def test_pages_of_a_large_input_are_renewed_if_its_model_has_changed_one(large_file: SharedFile) -> None:
    region = large_file.region()
    region.input_view(0, 20 * PAGE)[20 * PAGE - 1] = 99
    region.ended(0, 20 * PAGE)
    large_file.fill(19, 7)
    assert bytes(region.input_view(0, 20 * PAGE)[19 * PAGE :]) == bytes([7]) * PAGE


def test_pages_are_renewed_where_the_system_does_not_say_what_was_written(
    large_file: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "unwritten", lambda address, byte_size: False)
    region = large_file.region()
    view = region.input_view(0, 20 * PAGE)
    assert bytes(view[::PAGE]) == bytes(range(20))
    region.ended(0, 20 * PAGE)
    assert not any(is_mapped(address_of(view) + page * PAGE) for page in range(20))


def test_only_bytes_that_no_model_has_changed_are_seen_by_all(large_file: SharedFile) -> None:
    region = large_file.region()
    view = region.input_view(0, 40 * PAGE)
    copy = region.input_view(0, 40 * PAGE)  # of another request
    half = 20 * PAGE
    assert bytes(view) == bytes(copy)
    view[half] = 99
    assert region.seen_by_all(address_of(view), half)
    assert not region.seen_by_all(address_of(view), half + 1)
    assert not region.seen_by_all(address_of(view) + half, half)
    assert not region.seen_by_all(address_of(copy), half)
    assert not region.seen_by_all(address_of(view), PAGE), "few bytes are copied sooner than looked at"


def test_two_requests_on_the_same_bytes_do_not_see_each_others_changes(file: SharedFile) -> None:
    region = file.region()
    first = region.input_view(0, PAGE)
    first[0] = 99
    second = region.input_view(0, PAGE)
    assert second[0] == 0
    second[1] = 98
    assert (first[0], first[1]) == (99, 0)
    assert (file.byte(0), file.byte(1)) == (0, 0)


def test_two_requests_on_one_page_do_not_see_each_others_changes(file: SharedFile) -> None:
    region = file.region()
    first = region.input_view(PAGE + 100, PAGE)
    first[:] = bytes([99]) * PAGE
    for offset, byte_size in ((PAGE, 50), (2 * PAGE + 100, PAGE), (0, 4 * PAGE)):
        second = region.input_view(offset, byte_size)
        assert bytes(second) == os.pread(file.fd, byte_size, offset)
    region.ended(PAGE + 100, PAGE)
    assert bytes(region.input_view(0, 4 * PAGE)) == os.pread(file.fd, 4 * PAGE, 0)


def test_inputs_on_other_pages_are_not_copied(file: SharedFile) -> None:
    region = file.region()
    views = [region.input_view(page * PAGE, PAGE) for page in range(4)]
    for page, view in enumerate(views):
        assert isinstance(view.obj, mmap.mmap)
        file.fill(page, page + 50)  # a page that nobody has written to is the file's
        assert view[0] == page + 50


def test_an_input_that_ends_leaves_the_changes_of_another_at_the_same_place(file: SharedFile) -> None:
    region = file.region()
    first = region.input_view(0, PAGE)
    first[0] = 99
    second = region.input_view(0, PAGE)
    assert type(second.obj) is bytearray, "a copy, which is not watched"
    del second
    assert first[0] == 99
    third = region.input_view(0, PAGE)
    assert third[0] == 0, "the first goes on, so this is a copy too"


def test_inputs_of_a_region_that_begins_within_a_page_are_the_right_bytes(file: SharedFile) -> None:
    region = file.region(offset=PAGE - 10)
    view = region.input_view(0, 20)
    assert bytes(view) == bytes(10) + bytes([1]) * 10
    view[0] = view[19] = 99
    assert bytes(region.input_view(20, 10)) == bytes([1]) * 10
    region.ended(0, 20)
    file.fill(0, 5)
    file.fill(1, 6)
    assert bytes(region.input_view(0, 20)) == bytes([5]) * 10 + bytes([6]) * 10


def test_the_last_bytes_of_a_region_can_be_an_input() -> None:
    region = attached_region(b"x" * 5000, writable=False)
    view = region.input_view(4990, 10)
    view[9] = 0
    region.ended(4990, 10)
    assert bytes(region.input_view(4990, 10)) == b"x" * 10
    region.close()


# ---- shared mappings ------------------------------------------------------------------------


def test_what_is_written_to_a_writable_region_is_seen_by_others(file: SharedFile) -> None:
    region = file.region(writable=True)
    region.input_view(0, PAGE)[0] = 98
    region.view(PAGE, PAGE)[0] = 99
    assert (file.byte(0), file.byte(PAGE)) == (98, 99)
    region.ended(0, PAGE)
    assert file.byte(0) == 98, "an output may stay where its input was"


def test_an_input_in_a_volatile_region_is_read_only_and_its_outputs_are_not(file: SharedFile) -> None:
    region = file.region(writable=True, volatile=True)
    view = region.input_view(0, PAGE)
    assert view.readonly
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 99
    file.fill(0, 55)
    assert view[0] == 55, "the client may change it at any time"
    region.ended(0, PAGE)
    region.view(PAGE, PAGE)[0] = 99
    assert file.byte(PAGE) == 99


def test_the_properties_of_a_region_follow_from_who_may_write_to_it(file: SharedFile) -> None:
    kinds = {
        (writable, volatile): file.region(writable=writable, volatile=volatile)
        for writable in (True, False)
        for volatile in (True, False)
    }
    assert {kind: (region.volatile, region.steady, region.shared) for kind, region in kinds.items()} == {
        (True, False): (False, True, True),  # the kernel's arena
        (False, False): (False, False, False),  # the arena of another worker
        (True, True): (True, False, False),  # a client's region
        (False, True): (True, False, False),
    }


# ---- regions that cannot be used ------------------------------------------------------------


@pytest.mark.parametrize("writable", [True, False])
def test_a_region_that_its_owner_shortened_is_an_error_of_the_request(writable: bool) -> None:
    region = attached_region(bytes(PAGE), writable=writable, volatile=True, byte_size=PAGE + 1)
    for use in (region.view, region.input_view):
        with pytest.raises(InvalidArgument) as caught:
            use(0, 10)
        assert caught.value.message == "shared memory region was truncated by its owner"
    region.close()


def test_bytes_outside_of_the_region_are_never_used(file: SharedFile) -> None:
    region = file.region(offset=100)
    with pytest.raises(AssertionError, match=r"101 bytes at 16184 of 16284"):
        region.view(4 * PAGE - 200, 101)


# ---- the end --------------------------------------------------------------------------------


def test_arrays_that_still_point_into_a_closed_region_keep_their_memory(file: SharedFile) -> None:
    fd = os.dup(file.fd)
    region = AttachedRegion(fd, file.byte_size, 0, writable=False, volatile=False)
    view = region.input_view(PAGE, PAGE)
    region.close()
    assert view[0] == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_regions_are_known_by_their_numbers_until_they_are_detached() -> None:
    regions = AttachedRegions()
    region = attached_region(b"abc")
    regions.attach(7, region)
    assert regions.get(7) is region
    regions.detach(7)
    for use in (regions.get, regions.detach):
        with pytest.raises(KeyError):
            use(7)


def test_a_region_that_is_attached_again_replaces_the_first_which_stays_open_for_threads_of_the_model() -> None:
    regions = AttachedRegions()
    first, second = attached_region(b"abc"), attached_region(b"def")
    regions.attach(7, first)
    regions.attach(7, second)
    assert regions.get(7) is second
    assert bytes(first.view(0, 3)) == b"abc"
    files = [os.fstat(region._fd) for region in (first, second)]
    assert [descriptors_of(file) for file in files] == [2, 1], "the first is mapped"
    regions.detach(7)
    assert [descriptors_of(file) for file in files] == [0, 0]
    assert regions.find(7) is None


# ---- copies ---------------------------------------------------------------------------------


def test_a_copied_region_holds_what_was_sent_of_it() -> None:
    region = CopiedRegion(10)
    region.write(0, b"01234")
    region.write(5, b"56789")
    assert bytes(region.view(0, 10)) == b"0123456789"
    assert bytes(region.input_view(3, 4)) == b"3456"
    region.ended(3, 4)
    view = region.input_view(0, 10)
    region.close()
    assert bytes(view) == b"0123456789"


@pytest.mark.parametrize(("offset", "data"), [(-1, b"x"), (10, b"x"), (6, b"01234"), (0, bytes(11))])
def test_bytes_outside_of_a_copied_region_are_refused(offset: int, data: bytes) -> None:
    region = CopiedRegion(10)
    with pytest.raises(ValueError, match="of a region of 10"):
        region.write(offset, data)
    assert bytes(region.view(0, 10)) == bytes(10)


# ---- regions that are not mapped ------------------------------------------------------------


@pytest.fixture
def unmapped(file: SharedFile) -> UnmappedRegion:
    made = UnmappedRegion(os.dup(file.fd), file.byte_size - 100, 100, CopyBuffers())
    file.regions.append(made)
    return made


def test_an_input_of_a_region_that_is_not_mapped_is_a_copy_which_belongs_to_the_model(
    file: SharedFile, unmapped: UnmappedRegion
) -> None:
    view = unmapped.input_view(PAGE, PAGE)
    file.fill(1, 9)
    file.fill(2, 9)
    assert bytes(view) == b"\1" * (PAGE - 100) + b"\2" * 100
    view[0] = 7
    assert file.byte(PAGE + 100) == 9
    assert (unmapped.private, unmapped.steady, unmapped.shared, unmapped.volatile) == (True, True, False, False)


def test_an_output_is_written_to_a_region_that_is_not_mapped(file: SharedFile, unmapped: UnmappedRegion) -> None:
    unmapped.write(PAGE, b"abc")
    assert os.pread(file.fd, 5, PAGE + 99) == b"\1abc\1"


def test_a_region_that_is_not_mapped_and_is_shortened_at_any_time_causes_an_error(
    file: SharedFile, unmapped: UnmappedRegion
) -> None:
    unmapped.input_view(PAGE, PAGE)
    os.truncate(file.fd, PAGE + 200)
    with pytest.raises(InvalidArgument, match="was truncated by its owner"):
        unmapped.input_view(PAGE, PAGE)
    with pytest.raises(InvalidArgument, match="was truncated by its owner"):
        unmapped.write(PAGE, bytes(101))
    unmapped.write(PAGE, bytes(100))
    assert os.fstat(file.fd).st_size == PAGE + 200, "a write has lengthened the file"


def test_a_region_without_memory_for_its_pages_causes_an_error(
    unmapped: UnmappedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("backends.worker.memory.os.pwrite", full)
    with pytest.raises(InternalError, match="cannot be written: No space left on device"):
        unmapped.write(0, b"a")


# ---- memory for copies ----------------------------------------------------------------------


def address(view: memoryview) -> int:
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def test_memory_is_used_again_when_the_last_array_over_it_is_gone() -> None:
    buffers = CopyBuffers()
    view = buffers.take(10_000)
    first = address(view)
    array = np.frombuffer(view, np.float32)[10:].reshape(2, -1)
    del view
    assert address(buffers.take(10_000)) != first
    array[:] = 7
    del array
    assert address(buffers.take(9_000)) == first, "any size of the same power of two"


def test_a_view_has_the_size_that_was_asked_for_and_is_writable() -> None:
    buffers = CopyBuffers()
    for byte_size in (0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1):
        view = buffers.take(byte_size)
        assert (len(view), view.readonly) == (byte_size, False)


def test_a_limited_number_of_bytes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.worker.memory.MAX_KEPT_BYTE_SIZE", 4 * mmap.PAGESIZE)
    buffers = CopyBuffers()
    views = [buffers.take(mmap.PAGESIZE) for _ in range(8)]
    large = buffers.take(8 * mmap.PAGESIZE)
    del views, large
    buffers.take(3 * mmap.PAGESIZE)
    assert sum(map(len, buffers._free)) <= 8 * mmap.PAGESIZE, "four pages, and the last view"
