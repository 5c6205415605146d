"""Inputs of requests are found where they lie; a request with one that is not usable fails at once.

BYTES inputs that are not what their shape says. Texts are Triton's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.transport import wire
from backends.worker.held_inputs import HeldInputs
from backends.worker.inputs import InputReader, check_strings
from backends.worker.memory import AttachedRegions, CopyBuffers, UnmappedRegion
from backends.worker.request import WorkerRequest, in_memory_of_client
from kernel.errors import InvalidArgument
from shm.datatypes import encode_strings
from shm.lease import RegionNumber
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


def view(data: bytes, *shape: int) -> Tensor:
    return Tensor("IN", "BYTES", list(shape), memoryview(data))


def test_exactly_the_elements_of_the_shape_are_accepted() -> None:
    check_strings(view(encode_strings(["a", "", "bcd", "e"]), 2, 2), "", "m")
    check_strings(view(b"", 0), "", "m")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (encode_strings(["a"]), "expected 2 string elements for inference input 'IN' for model 'm', got 1"),
        (
            encode_strings(["a", "b", "c"]),
            "unexpected number of string elements 3 for inference input 'IN' for model 'm', expecting 2",
        ),
        (
            encode_strings(["a"]) + b"\x01\x00",
            "incomplete string length indicator for inference input 'IN' for model 'm', expecting 4 bytes but only 2 "
            "bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (
            encode_strings(["a", "b"]) + b"\x01",
            "incomplete string length indicator for inference input 'IN' for model 'm', expecting 4 bytes but only 1 "
            "bytes available. Please make sure the string length indicator is in one buffer.",
        ),
    ],
)
def test_anything_else_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_strings(view(data, 2), "7", "m")
    assert caught.value.message == f"[request id: 7] {text}"


def test_a_string_that_is_cut_short_is_refused_in_the_words_of_a_backend() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_strings(view(encode_strings(["a"]) + b"\xff\xff\xff\xffb", 2), "7", "m")
    assert caught.value.message == (
        "incomplete string data for inference input 'IN', expecting string of length 4294967295 but only 1 bytes "
        "available"
    )
