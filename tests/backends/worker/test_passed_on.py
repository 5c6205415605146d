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
from backends.worker.memory import AttachedRegion, AttachedRegions, CopyBuffers, UnmappedRegion
from backends.worker.output_memory import ArenaOutputs
from backends.worker.outputs import OutputWriter
from backends.worker.request import OutputValue, WorkerRequest
from backends.worker.responder import BatchResponder
from shm.lease import RegionNumber
from shm.tensor import RequestedOutput, Span, Tensor
from tests.backends.worker.regions import attached_region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shm.arena import Arena

INPUT = np.arange(4096, dtype=np.float32)
LARGE = np.arange(1 << 16, dtype=np.float32)
#: Where the input lies in each of the regions: the kernel's arena, a client's region, the arena of another worker.
OFFSET = 128
KERNELS_ARENA, CLIENTS_REGION, OTHERS_ARENA, CLIENTS_FILE, OTHERS_LARGE_ARENA = 1, 2, 3, 4, 5


class Bench:
    """A worker's memory, with an input in each of the regions."""

    def __init__(self) -> None:
        self.sent: list[wire.ToKernel] = []
        self.arenas: list[Arena] = []
        self.regions = AttachedRegions()
        self.held = HeldInputs(self.sent.append, lambda: None)
        self.inputs = InputReader(self.regions, self.held)
        self.memory = ArenaOutputs(self.arenas.append)
        self.outputs = OutputWriter(self.regions, self.inputs, self.memory, self.held)
        self.answers = BatchResponder(self.outputs, self.held, self.sent.append, lambda: None)  # type: ignore[arg-type, return-value]
        data = bytes(OFFSET) + INPUT.tobytes()
        self.regions.attach(KERNELS_ARENA, attached_region(data))
        self.regions.attach(CLIENTS_REGION, attached_region(data, volatile=True))
        self.regions.attach(OTHERS_ARENA, attached_region(data, writable=False))
        self.regions.attach(OTHERS_LARGE_ARENA, attached_region(bytes(OFFSET) + LARGE.tobytes(), writable=False))

    def request(self, *outputs: RequestedOutput, region: int = KERNELS_ARENA) -> WorkerRequest:
        size = LARGE.size if region == OTHERS_LARGE_ARENA else INPUT.size
        given = Tensor("IN", "FP32", [size], None, Span(RegionNumber(region), OFFSET, 4 * size))
        opened = self.answers.open_batch([wire.RequestMessage(7, [given], list(outputs))])
        (request,) = self.inputs.read(opened)
        return request

    def finish(self) -> list[Tensor]:
        (final,) = self.answers.close_batch()
        assert not final.error_code
        return final.outputs

    def content(self, output: Tensor) -> Any:
        region, offset, byte_size = place(output)
        if region == wire.OUTPUT_ARENA:
            return np.frombuffer(self.arenas[0].region.view(offset, byte_size), np.float32)
        return np.frombuffer(self.regions.get(region).view(offset, byte_size), np.float32)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for number in (KERNELS_ARENA, CLIENTS_REGION, OTHERS_ARENA, OTHERS_LARGE_ARENA):
        made.regions.detach(number)
    made.memory.close()


def place(output: Tensor) -> tuple[int, int, int]:
    """Return the number of the region that an output lies in, its offset there and its byte size."""
    assert output.span is not None
    return output.span.lease.region_number, output.span.offset, output.span.byte_size


def attached_view(bench: Bench, number: int) -> Any:
    """Return the large input as the region's owner sees it."""
    region = bench.regions.get(number)
    assert isinstance(region, AttachedRegion)
    memory = memoryview(bytearray(LARGE.nbytes))
    region.read_into(OFFSET, memory)
    return np.frombuffer(memory, np.float32)


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
    assert (place(whole), whole.shape) == ((KERNELS_ARENA, OFFSET, INPUT.nbytes), [4096])
    assert (place(shaped), shaped.shape) == ((KERNELS_ARENA, OFFSET, INPUT.nbytes), [2, 2048])
    assert place(part) == (KERNELS_ARENA, OFFSET + 4096, 8192)
    np.testing.assert_array_equal(bench.content(part), INPUT[1024:3072])
    assert bench.sent == []


def test_what_the_model_keeps_is_copied(bench: Bench) -> None:
    request = bench.request()
    kept = given(request)
    request.respond([out(kept)])
    del request
    (ref,) = bench.finish()
    kept += 1
    assert place(ref)[0] == wire.OUTPUT_ARENA
    np.testing.assert_array_equal(bench.content(ref), INPUT)
    assert bench.sent[-1] == wire.InputsHeld([7])


def test_what_the_model_keeps_and_cannot_be_copied_is_an_error(bench: Bench) -> None:
    bench.outputs.memory.byte_size = 1 << 12
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
    assert place(ref)[0] == wire.OUTPUT_ARENA
    np.testing.assert_array_equal(bench.content(ref), expected)


def test_an_output_is_written_to_a_region_that_is_not_mapped_when_it_is_complete(bench: Bench) -> None:
    fd = os.memfd_create("client")
    os.ftruncate(fd, 2 * INPUT.nbytes)
    bench.regions.attach(CLIENTS_FILE, UnmappedRegion(fd, 2 * INPUT.nbytes, 0, CopyBuffers()))
    asked = [
        RequestedOutput("OUT", span=Span(RegionNumber(CLIENTS_FILE), 64, INPUT.nbytes)),
        RequestedOutput("TOO_FAR", span=Span(RegionNumber(CLIENTS_FILE), INPUT.nbytes, INPUT.nbytes)),
    ]
    request = bench.request(*asked)
    assert request.reserve("OUT", "FP32", [INPUT.size]) is None, "the model would write to a copy"
    request.respond([out(INPUT)])
    (output,) = bench.finish()
    assert place(output) == (CLIENTS_FILE, 64, INPUT.nbytes)
    assert os.pread(fd, INPUT.nbytes, 64) == INPUT.tobytes()
    os.truncate(fd, INPUT.nbytes)
    request = bench.request(*asked)
    request.respond([out(INPUT, "TOO_FAR")])
    (final,) = bench.answers.close_batch()
    assert final.error_text == "shared memory region was truncated by its owner"
    bench.regions.detach(CLIENTS_FILE)


def test_an_output_that_the_client_wants_in_its_memory_is_copied_there(bench: Bench) -> None:
    request = bench.request(RequestedOutput("OUT", 0, Span(RegionNumber(CLIENTS_REGION), 0, INPUT.nbytes)))
    request.respond([out(given(request))])
    del request
    (ref,) = bench.finish()
    assert place(ref) == (CLIENTS_REGION, 0, INPUT.nbytes)
    np.testing.assert_array_equal(bench.content(ref), INPUT)


def test_large_inputs_from_another_worker_are_outputs_where_they_are_if_the_model_only_reads_them(
    bench: Bench,
) -> None:
    request = bench.request(region=OTHERS_LARGE_ARENA)
    array = given(request)
    assert array.sum() == LARGE.sum()
    request.respond([out(array), out(array[1024:50_000], "PART")])
    del request, array
    whole, part = bench.finish()
    assert place(whole) == (OTHERS_LARGE_ARENA, OFFSET, LARGE.nbytes)
    assert place(part) == (OTHERS_LARGE_ARENA, OFFSET + 4096, 4 * (50_000 - 1024))
    assert (bench.outputs.copies, bench.sent) == (0, [])


def test_an_input_from_another_worker_that_the_model_keeps_is_passed_on_as_it_was(bench: Bench) -> None:
    request = bench.request(region=OTHERS_LARGE_ARENA)
    kept = given(request)
    request.respond([out(kept)])
    del request
    (ref,) = bench.finish()
    kept += 1
    assert place(ref) == (OTHERS_LARGE_ARENA, OFFSET, LARGE.nbytes)
    np.testing.assert_array_equal(attached_view(bench, OTHERS_LARGE_ARENA), LARGE)
    assert bench.sent[-1] == wire.InputsHeld([7])


def test_a_large_input_from_another_worker_that_the_model_has_changed_is_copied(bench: Bench) -> None:
    request = bench.request(region=OTHERS_LARGE_ARENA)
    array = given(request)
    array[-1] = -1
    request.respond([out(array)])
    del request, array
    (ref,) = bench.finish()
    assert place(ref)[0] == wire.OUTPUT_ARENA
    assert bench.content(ref)[-1] == -1
    np.testing.assert_array_equal(bench.content(ref)[:-1], LARGE[:-1])


@pytest.mark.parametrize("region", [CLIENTS_REGION, OTHERS_ARENA], ids=["client", "other worker"])
def test_regions_of_clients_and_small_inputs_from_another_worker_are_never_passed_on(bench: Bench, region: int) -> None:
    request = bench.request(region=region)
    request.respond([out(given(request))])
    del request
    (ref,) = bench.finish()
    assert place(ref)[0] == wire.OUTPUT_ARENA
    np.testing.assert_array_equal(bench.content(ref), INPUT)


def test_what_a_thread_of_the_model_answers_is_copied(bench: Bench) -> None:
    request = bench.request()
    thread = threading.Thread(target=respond_with_input, args=[request])
    thread.start()
    thread.join()
    del request, thread
    (ref,) = bench.finish()
    assert place(ref)[0] == wire.OUTPUT_ARENA
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
    assert [place(ref)[0] for ref in refs] == [wire.OUTPUT_ARENA] * 2
