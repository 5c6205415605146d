"""Outputs that are inputs stay where they are, unless the model, or the client, wants something else of them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.transport import wire
from backends.worker.held_inputs import HeldInputs
from backends.worker.inputs import InputReader
from backends.worker.memory import AttachedRegions
from backends.worker.outputs import OutputWriter
from backends.worker.request import OutputValue, WorkerRequest
from backends.worker.responder import BatchResponder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shm.arena import Arena

INPUT = np.arange(4096, dtype=np.float32)
#: Where the input lies in region 1, and of what kind that is by default.
OFFSET = 128
CLIENTS_REGION = 2


class Bench:
    """A worker's memory, with an input in the kernel's arena and a region of a client for outputs."""

    def __init__(self) -> None:
        self.sent: list[wire.ToKernel] = []
        self.arenas: list[Arena] = []
        self.regions = AttachedRegions()
        self.held = HeldInputs(self.sent.append, lambda: None)
        self.outputs = OutputWriter(self.regions, self.arenas.append)
        self.answers = BatchResponder(self.outputs, self.held, self.sent.append, lambda: None)  # type: ignore[arg-type, return-value]
        for number in (1, CLIENTS_REGION):
            fd = os.memfd_create("test")
            os.ftruncate(fd, 1 << 16)
            self.regions.attach(number, fd, 1 << 16, 0, foreign=number == CLIENTS_REGION)
        self.regions.view(1, OFFSET, INPUT.nbytes)[:] = INPUT.tobytes()

    def request(self, *outputs: RequestedOutput, region: int = 1) -> WorkerRequest:
        foreign = region == CLIENTS_REGION
        given = Tensor("IN", "FP32", [INPUT.size], None, region, OFFSET, INPUT.nbytes, foreign)
        opened = self.answers.open_batch([wire.RequestMessage(7, [given], list(outputs))])
        (request,) = InputReader(self.regions, self.held).read(opened)
        return request

    def finish(self) -> list[Tensor]:
        (final,) = self.answers.close_batch()
        assert not final.error_code
        return final.outputs

    def content(self, ref: Tensor) -> Any:
        if ref.region == wire.OUTPUT_ARENA:
            return np.frombuffer(self.arenas[0].view(ref.offset, ref.byte_size), np.float32)
        return np.frombuffer(self.regions.view(ref.region, ref.offset, ref.byte_size), np.float32)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.regions.detach(1)
    made.regions.detach(CLIENTS_REGION)
    for arena in made.arenas:
        arena.close()


def out(array: Any, name: str = "OUT") -> OutputValue:
    return OutputValue(name, "FP32", array)


def given(request: WorkerRequest) -> Any:
    return request.inputs[0].as_numpy()


def respond_with_input(request: WorkerRequest) -> None:
    request.respond([out(given(request))])


def test_an_input_and_parts_of_it_are_outputs_where_they_are(bench: Bench) -> None:
    request = bench.request()
    array = given(request)
    request.respond([out(array), out(array.reshape(2, -1), "SHAPED"), out(array[1024:3072], "PART")])
    del request, array
    whole, shaped, part = bench.finish()
    assert (whole.region, whole.offset, whole.byte_size, whole.shape) == (1, OFFSET, INPUT.nbytes, [4096])
    assert (shaped.region, shaped.offset, shaped.byte_size, shaped.shape) == (1, OFFSET, INPUT.nbytes, [2, 2048])
    assert (part.region, part.offset, part.byte_size) == (1, OFFSET + 4096, 8192)
    np.testing.assert_array_equal(bench.content(part), INPUT[1024:3072])
    assert bench.sent == []


def test_what_the_model_keeps_is_copied(bench: Bench) -> None:
    request = bench.request()
    kept = given(request)
    request.respond([out(kept)])
    del request
    (ref,) = bench.finish()
    kept += 1
    assert ref.region == wire.OUTPUT_ARENA
    np.testing.assert_array_equal(bench.content(ref), INPUT)
    assert bench.sent[-1] == wire.InputsHeld([7])


def test_what_the_model_keeps_and_cannot_be_copied_is_an_error(bench: Bench) -> None:
    bench.outputs.arena_byte_size = 1 << 12
    request = bench.request()
    kept = given(request)
    request.respond([out(kept)])
    del request
    (final,) = bench.answers.close_batch()
    assert final.error_code
    assert not final.outputs


@pytest.mark.parametrize(
    "changed",
    [
        lambda array: array[::-1],
        lambda array: array[::2],
        lambda array: array.copy(),
        lambda array: array.reshape(64, 64).T,
        lambda array: array + 1,
    ],
    ids=["reversed", "strided", "copied", "transposed", "computed"],
)
def test_other_arrays_are_written_to_the_workers_arena(bench: Bench, changed: Any) -> None:
    request = bench.request()
    request.respond([out(changed(given(request)))])
    expected = changed(INPUT).reshape(-1)
    del request
    (ref,) = bench.finish()
    assert ref.region == wire.OUTPUT_ARENA
    np.testing.assert_array_equal(bench.content(ref), expected)


def test_an_output_that_the_client_wants_in_its_memory_is_copied_there(bench: Bench) -> None:
    request = bench.request(RequestedOutput("OUT", 0, CLIENTS_REGION, 0, INPUT.nbytes))
    request.respond([out(given(request))])
    del request
    (ref,) = bench.finish()
    assert (ref.region, ref.offset, ref.foreign) == (CLIENTS_REGION, 0, True)
    np.testing.assert_array_equal(bench.content(ref), INPUT)


def test_a_clients_memory_is_never_passed_on(bench: Bench) -> None:
    bench.regions.view(CLIENTS_REGION, OFFSET, INPUT.nbytes)[:] = INPUT.tobytes()
    request = bench.request(region=CLIENTS_REGION)
    request.respond([out(given(request))])
    del request
    (ref,) = bench.finish()
    assert ref.region == wire.OUTPUT_ARENA
    np.testing.assert_array_equal(bench.content(ref), INPUT)


def test_what_a_thread_of_the_model_answers_is_copied(bench: Bench) -> None:
    request = bench.request()
    thread = threading.Thread(target=respond_with_input, args=[request])
    thread.start()
    thread.join()
    del request, thread
    (ref,) = bench.finish()
    assert ref.region == wire.OUTPUT_ARENA
    assert not bench.held.watched


def test_an_answer_that_is_not_the_last_and_one_that_comes_later_are_copies(bench: Bench) -> None:
    request = bench.request()
    request.respond([out(given(request))], final=False)
    assert bench.answers.close_batch() == []
    request.respond([out(given(request))])
    refs = [
        message.response.outputs[0]
        for message in bench.sent
        if isinstance(message, wire.Responded) and message.response
    ]
    assert [ref.region for ref in refs] == [wire.OUTPUT_ARENA] * 2
