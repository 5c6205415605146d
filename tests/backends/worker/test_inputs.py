"""Inputs of requests are found where they lie; a request with one that is not usable fails at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.transport import wire
from backends.worker.held_inputs import HeldInputs
from backends.worker.inputs import InputReader
from backends.worker.memory import AttachedRegions, CopyBuffers, UnmappedRegion
from backends.worker.request import WorkerRequest, in_memory_of_client
from shm.lease import RegionNumber
from shm.strings import encode_strings
from shm.tensor import Span, Tensor
from tests.backends.conftest import Lab
from tests.backends.worker.regions import attached_region

if TYPE_CHECKING:
    from collections.abc import Iterator

ONES = np.ones(4, np.float32).tobytes()
STRINGS = encode_strings(["a", "bc"])

#: The kernel's arena, another worker's arena, and regions of clients, of which one is not mapped: each holds `ONES` and
#: behind them `STRINGS`.
KERNELS, OTHERS, CLIENTS, UNMAPPED = 1, 2, 3, 4


class Bench(Lab):
    """A reader with the three regions."""

    def __init__(self) -> None:
        super().__init__()
        self.regions = AttachedRegions()
        self.sent: list[wire.ToKernel] = []
        self.reader = InputReader(self.regions, HeldInputs(self.sent.append, lambda: None))
        self.reader.model_name = "m"
        self.regions.attach(KERNELS, attached_region(ONES + STRINGS))
        self.regions.attach(OTHERS, attached_region(ONES + STRINGS, writable=False))
        self.regions.attach(CLIENTS, attached_region(ONES + STRINGS, volatile=True))
        self.unmapped_fd = os.memfd_create("test")
        os.pwrite(self.unmapped_fd, ONES + STRINGS, 0)
        self.regions.attach(UNMAPPED, UnmappedRegion(self.unmapped_fd, len(ONES + STRINGS), 0, CopyBuffers()))

    def requests(self, *inputs: list[Tensor]) -> list[WorkerRequest]:
        return [
            WorkerRequest(wire.RequestMessage(number, refs, id=f"r{number}"), [], self)
            for number, refs in enumerate(inputs, start=1)
        ]


def place(region: int, offset: int = 0, byte_size: int = len(ONES)) -> Span:
    return Span(RegionNumber(region), offset, byte_size)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for number in (KERNELS, OTHERS, CLIENTS, UNMAPPED):
        made.regions.detach(number)


def test_an_input_has_the_same_elements_wherever_it_lies(bench: Bench) -> None:
    given = [Tensor("A", "FP32", [2, 2], ONES)]
    given += [Tensor("A", "FP32", [2, 2], None, place(region)) for region in (KERNELS, OTHERS, CLIENTS, UNMAPPED)]
    requests = bench.requests(*([tensor] for tensor in given))
    assert bench.reader.read(requests) == requests
    tensors = [request.inputs[0] for request in requests]
    for tensor in tensors:
        assert (tensor.name, tensor.datatype, tensor.shape) == ("A", "FP32", [2, 2])
        np.testing.assert_array_equal(tensor.as_numpy(), np.ones((2, 2), np.float32))
    assert [tensor.as_numpy().flags.writeable for tensor in tensors] == [False, True, True, False, True]
    assert [in_memory_of_client(tensor) for tensor in tensors] == [False, False, False, True, False]


def test_what_a_model_writes_into_an_input_is_seen_by_others_in_the_kernels_arena_alone(bench: Bench) -> None:
    given = [Tensor("A", "FP32", [4], None, place(region)) for region in (KERNELS, OTHERS)]
    requests = bench.requests(*([tensor] for tensor in given))
    bench.reader.read(requests)
    for request in requests:
        request.inputs[0].as_numpy()[:] = 7
    kernels, others = (bench.regions.get(number) for number in (KERNELS, OTHERS))
    assert kernels.shared
    assert np.frombuffer(kernels.view(0, len(ONES)), np.float32).tolist() == [7, 7, 7, 7]
    assert not others.shared
    for request in requests:
        assert request.inputs[0].as_numpy().tolist() == [7, 7, 7, 7]
        request.inputs.clear()


def test_a_message_keeps_no_view_of_its_inputs(bench: Bench) -> None:
    [request] = bench.requests([Tensor("A", "FP32", [4], None, place(KERNELS))])
    bench.reader.read([request])
    assert request.ref.inputs[0].data is None, "views would keep the input from being free"


def test_strings_are_checked_wherever_they_lie_and_copied_where_their_producer_may_change_them(bench: Bench) -> None:
    given = [Tensor("S", "BYTES", [2], STRINGS)]
    spans = [place(region, len(ONES), len(STRINGS)) for region in (OTHERS, CLIENTS)]
    given += [Tensor("S", "BYTES", [2], None, span) for span in spans]
    requests = bench.requests(*([tensor] for tensor in given))
    assert bench.reader.read(requests) == requests
    for span in spans:
        bench.regions.get(span.lease.region_number).view(span.offset, span.byte_size)[:] = bytes(span.byte_size)
    for request in requests:
        assert request.inputs[0].as_numpy().tolist() == [b"a", b"bc"]


def test_inputs_in_memory_of_a_client_are_copied_for_a_model_that_keeps_its_inputs(bench: Bench) -> None:
    bench.reader.copies_volatile = True
    [request] = bench.requests([Tensor("A", "FP32", [4], None, place(CLIENTS))])
    bench.reader.read([request])
    bench.regions.get(CLIENTS).view(0, len(ONES))[:] = bytes(len(ONES))
    assert request.inputs[0].as_numpy().tolist() == [1, 1, 1, 1]
    assert request.inputs[0].as_numpy().flags.writeable


def test_a_region_that_is_not_mapped_may_be_shortened_before_and_after_its_inputs_are_read(bench: Bench) -> None:
    floats = Tensor("A", "FP32", [4], None, place(UNMAPPED))
    strings = Tensor("S", "BYTES", [2], None, place(UNMAPPED, len(ONES), len(STRINGS)))
    before, after = bench.requests([floats, strings], [floats])
    assert bench.reader.read([before]) == [before]
    os.truncate(bench.unmapped_fd, 0)
    assert before.inputs[0].as_numpy().tolist() == [1, 1, 1, 1]
    assert before.inputs[1].as_numpy().tolist() == [b"a", b"bc"]
    assert bench.reader.read([after]) == []
    assert bench.error(after).message == "shared memory region was truncated by its owner"


def test_a_request_whose_input_is_not_usable_fails_and_the_others_do_not(bench: Bench) -> None:
    good = Tensor("A", "FP32", [4], ONES)
    bad = Tensor("S", "BYTES", [3], STRINGS)
    first, second, third = bench.requests([good], [good, bad], [good])
    assert bench.reader.read([first, second, third]) == [first, third]
    assert bench.error(second).message == (
        "[request id: r2] expected 3 string elements for inference input 'S' for model 'm', got 2"
    )
    assert not first.finished
    assert not third.finished
