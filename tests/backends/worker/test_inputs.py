"""Inputs of requests are found where they lie; a request with one that is not usable is answered at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.transport import wire
from backends.worker.held_inputs import HeldInputs
from backends.worker.inputs import InputReader
from backends.worker.memory import AttachedRegions
from backends.worker.request import WorkerRequest
from shm.strings import encode_strings
from tests.backends.conftest import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator

ONES = np.ones(4, np.float32).tobytes()
STRINGS = encode_strings(["a", "bc"])


class Bench(Lab):
    """A reader with one region, number 1, that holds `ONES` and behind them `STRINGS`."""

    def __init__(self) -> None:
        super().__init__()
        self.regions = AttachedRegions()
        self.told: list[wire.ToKernel] = []
        self.reader = InputReader(self.regions, HeldInputs(self.told.append, lambda: None))
        self.reader.model_name = "m"
        fd = os.memfd_create("test")
        os.write(fd, ONES + STRINGS)
        self.regions.attach(1, fd, len(ONES + STRINGS), 0, foreign=False)

    def requests(self, *inputs: list[Tensor]) -> list[WorkerRequest]:
        return [
            WorkerRequest(wire.RequestMessage(number, refs, id=f"r{number}"), [], self)
            for number, refs in enumerate(inputs, start=1)
        ]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.regions.detach(1)


def test_an_input_has_the_same_elements_wherever_it_lies(bench: Bench) -> None:
    refs = [
        Tensor("A", "FP32", [2, 2], ONES),
        Tensor("A", "FP32", [2, 2], None, 1, 0, len(ONES)),
        Tensor("A", "FP32", [2, 2], None, 1, 0, len(ONES), True),
    ]
    requests = bench.requests(*([ref] for ref in refs))
    assert bench.reader.read(requests) == requests
    views = [request.inputs[0] for request in requests]
    for view in views:
        assert (view.name, view.datatype, view.shape) == ("A", "FP32", [2, 2])
        np.testing.assert_array_equal(view.as_numpy(), np.ones((2, 2), np.float32))
    assert [view.data.readonly for view in views] == [True, False, True], "an arena alone may be written to"
    assert [view.foreign for view in views] == [False, False, True]
    for view in views:
        view.data.release()


def test_strings_are_checked_wherever_they_lie_and_copied_out_of_a_client_s_memory(bench: Bench) -> None:
    refs = [
        Tensor("S", "BYTES", [2], STRINGS),
        Tensor("S", "BYTES", [2], None, 1, len(ONES), len(STRINGS), True),
    ]
    requests = bench.requests(*([ref] for ref in refs))
    assert bench.reader.read(requests) == requests
    bench.regions.view(1, len(ONES), len(STRINGS))[:] = bytes(len(STRINGS))
    for request in requests:
        assert request.inputs[0].as_numpy().tolist() == [b"a", b"bc"]


def test_a_request_whose_input_is_not_usable_is_answered_and_the_others_are_not(bench: Bench) -> None:
    good = Tensor("A", "FP32", [4], ONES)
    bad = Tensor("S", "BYTES", [3], STRINGS)
    first, second, third = bench.requests([good], [good, bad], [good])
    assert bench.reader.read([first, second, third]) == [first, third]
    assert bench.error(second).message == (
        "[request id: r2] expected 3 string elements for inference input 'S' for model 'm', got 2"
    )
    assert not first.finished
    assert not third.finished
