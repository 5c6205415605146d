"""A helper reads and writes regions of clients, and survives what clients do to them."""

from __future__ import annotations

import os

import pytest

from backends.helper.region_io import RegionIo
from backends.transport import wire
from backends.worker.memory import AttachedRegion, AttachedRegions
from backends.worker.output_memory import ArenaOutputs
from shm.lease import RegionNumber
from shm.tensor import Span

CLIENT, KERNEL = RegionNumber(1), RegionNumber(2)


class Lab:
    """A client's region of 8 KiB, from byte 100 of its object on, and an arena of the kernel."""

    def __init__(self) -> None:
        self.sent: list[wire.ToKernel] = []
        self.client, self.kernel = os.memfd_create("client"), os.memfd_create("kernel")
        os.ftruncate(self.client, 100 + 8192)
        os.ftruncate(self.kernel, 8192)
        self.regions = AttachedRegions()
        self.regions.attach(1, AttachedRegion(os.dup(self.client), 8192, 100, writable=True, volatile=True))
        self.regions.attach(2, AttachedRegion(os.dup(self.kernel), 8192, 0, writable=True, volatile=False))
        self.memory = ArenaOutputs(lambda arena: None)
        self.io = RegionIo(self.regions, self.memory, self.sent.append)

    def close(self) -> None:
        for number in (1, 2):
            self.regions.detach(number)
        os.close(self.client)
        os.close(self.kernel)
        if self.memory.arena is not None:
            self.memory.arena.close()


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_a_span_is_read_into_the_helper_s_arena(lab: Lab) -> None:
    os.pwrite(lab.client, b"x" * 5000, 100 + 16)
    lab.io.read(wire.ReadSpan(7, Span(CLIENT, 16, 5000)))
    (answer,) = lab.sent
    assert isinstance(answer, wire.SpanRead)
    assert (answer.task, answer.error_text) == (7, "")
    assert answer.tensor is not None
    assert answer.tensor.span is not None
    assert lab.memory.arena is not None
    assert lab.memory.arena.region.view(answer.tensor.span.offset, 5000) == b"x" * 5000
    lab.close()


def test_a_region_that_its_owner_shortened_is_an_error_and_takes_no_memory(lab: Lab) -> None:
    os.ftruncate(lab.client, 200)
    lab.io.read(wire.ReadSpan(7, Span(CLIENT, 0, 8192)))
    os.ftruncate(lab.kernel, 8192)
    lab.io.write(wire.WriteSpan(8, Span(KERNEL, 0, 64), Span(CLIENT, 64, 64)))
    read, written = lab.sent
    assert isinstance(read, wire.SpanRead)
    assert isinstance(written, wire.SpanWritten)
    assert read.error_text == written.error_text == "shared memory region was truncated by its owner"
    assert lab.memory.arena is not None
    assert lab.memory.arena.allocator.block_count == 0
    assert os.fstat(lab.client).st_size == 200, "a write makes no region longer"
    lab.close()


def test_a_span_is_written_where_it_belongs(lab: Lab) -> None:
    os.pwrite(lab.kernel, b"y" * 64, 128)
    lab.io.write(wire.WriteSpan(8, Span(KERNEL, 128, 64), Span(CLIENT, 32, 64)))
    assert lab.sent == [wire.SpanWritten(8)]
    assert os.pread(lab.client, 66, 100 + 31) == b"\0" + b"y" * 64 + b"\0"
    lab.close()
