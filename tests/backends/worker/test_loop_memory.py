"""Shared memory of a whole worker: its own arena, regions that it is given, and inputs that its model keeps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.transport import wire
from backends.worker.request import OutputValue
from shm.lease import RegionNumber
from shm.region import check_sealed
from shm.tensor import Span
from tests.backends.worker.regions import arena_with
from tests.backends.worker.threaded_worker import LARGE, Bench, echo, request
from tests.open_descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.worker.request import WorkerRequest
    from shm.arena import Arena


def content(arena: Arena, span: Span) -> list[float]:
    data = os.pread(arena.region.fd, span.byte_size, span.offset)
    return list(np.frombuffer(data, np.float32).tolist())


def test_large_outputs_lie_in_an_arena_of_the_worker_that_others_can_only_read(bench: Bench) -> None:
    bench.load(lambda requests: requests[0].respond([OutputValue("OUT", "FP32", LARGE)]))
    offsets: list[int] = []
    bench.send(wire.Execute(1, [request(1)]))
    created = bench.next(wire.ArenaCreated)
    fd = bench.channel.take_fd()
    assert created.byte_size == 1 << 20
    check_sealed(fd, created.byte_size)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    for number in (2, 3, 4):
        [output] = bench.next(wire.Executed).responses[0].outputs
        assert output.span is not None
        assert output.span.lease.region_number == wire.OUTPUT_ARENA
        assert np.array_equal(np.frombuffer(os.pread(fd, output.byte_size, output.span.offset), np.float32), LARGE)
        offsets.append(output.span.offset)
        if number == 3:
            bench.send(wire.FreeBlocks([offsets[0]]))
        bench.send(wire.Execute(number, [request(number)]))
    bench.next(wire.Executed)
    assert offsets[1] != offsets[0], "it is in use"
    assert offsets[2] == offsets[0], "it is free"
    os.close(fd)
    bench.stop()


def test_an_input_in_the_kernels_arena_may_stay_there_as_an_output(bench: Bench) -> None:
    def add_one(requests: Sequence[WorkerRequest]) -> None:
        array = requests[0].inputs[0].as_numpy()
        array += 1
        requests[0].respond([OutputValue("OUT", "FP32", array)])

    bench.load(add_one)
    with arena_with(LARGE) as (arena, span):
        bench.channel.send_with_fd(wire.Attach(7, 1 << 16), arena.region.fd)
        bench.send(wire.Execute(1, [request(1, span=span)]))
        [output] = bench.next(wire.Executed).responses[0].outputs
        assert output.span is not None
        assert (output.span.lease.region_number, output.span.offset) == (7, span.offset)
        assert content(arena, span) == (LARGE + 1).tolist()
    bench.stop()


def test_an_input_in_another_workers_arena_is_changed_for_this_model_alone(bench: Bench) -> None:
    sums: list[float] = []

    def change(requests: Sequence[WorkerRequest]) -> None:
        array = requests[0].inputs[0].as_numpy()
        sums.append(float(array.sum()))
        array[:] = 0
        requests[0].respond([])

    bench.load(change)
    with arena_with(LARGE) as (arena, span):
        bench.channel.send_with_fd(wire.Attach(7, 1 << 16, writable=False), arena.region.fd)
        for number in (1, 2):
            bench.send(wire.Execute(number, [request(number, span=span)]))
            bench.next(wire.Executed)
        assert sums == [float(LARGE.sum())] * 2, "the next input is not the one that was changed"
        assert content(arena, span) == LARGE.tolist()
    bench.stop()


def test_a_region_that_is_detached_is_closed(bench: Bench) -> None:
    bench.load()
    with arena_with(LARGE) as (arena, span):
        before = open_descriptors()
        bench.channel.send_with_fd(wire.Attach(7, 1 << 16), arena.region.fd)
        bench.send(wire.Execute(1, [request(1, span=span)]))
        bench.next(wire.Executed)
        assert open_descriptors() - before
        bench.send(wire.Detach(7), wire.Execute(2, [request(2)]))
        bench.next(wire.Executed)
        assert open_descriptors() <= before
    bench.stop()


def test_an_output_of_the_worker_can_be_its_input_and_changing_it_changes_no_output(bench: Bench) -> None:
    def respond(requests: Sequence[WorkerRequest]) -> None:
        requests[0].respond([OutputValue("OUT", "FP32", LARGE)])

    seen: list[list[float]] = []

    def change(requests: Sequence[WorkerRequest]) -> None:
        array = requests[0].inputs[0].as_numpy()
        seen.append(array.tolist())
        array[:] = 0
        requests[0].respond([])

    backend = bench.load(respond)
    bench.send(wire.Execute(1, [request(1)]))
    bench.next(wire.ArenaCreated)
    fd = bench.channel.take_fd()
    [output] = bench.next(wire.Executed).responses[0].outputs
    assert output.span is not None
    backend.on_execute = change
    place = Span(RegionNumber(9), output.span.offset, output.span.byte_size)
    bench.send(wire.OwnArena(9), wire.Execute(2, [request(2, span=place)]))
    bench.next(wire.Executed)
    assert seen == [LARGE.tolist()]
    assert np.array_equal(np.frombuffer(os.pread(fd, place.byte_size, place.offset), np.float32), LARGE)
    bench.send(wire.Detach(9), wire.FreeBlocks([place.offset]))
    os.close(fd)
    bench.stop()


def test_the_kernel_hears_which_inputs_a_model_keeps_and_when_it_lets_them_go(bench: Bench) -> None:
    kept: list[object] = []

    def keep(requests: Sequence[WorkerRequest]) -> None:
        kept.append(requests[0].inputs[0].as_numpy())
        requests[0].respond([])

    backend = bench.load(keep)
    with arena_with(LARGE) as (arena, span):
        bench.channel.send_with_fd(wire.Attach(7, 1 << 16), arena.region.fd)
        bench.send(wire.Execute(1, [request(1, span=span)]))
        assert bench.next(wire.InputsHeld).requests == [1]
        bench.next(wire.Executed)
        kept.clear()
        backend.on_execute = echo
        bench.send(wire.Execute(2, [request(2)]))
        bench.next(wire.Executed)
        assert bench.next(wire.InputsFreed).requests == [1]
    bench.stop()


def test_a_model_that_keeps_memory_of_a_client_gets_copies_from_then_on(bench: Bench) -> None:
    kept: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []

    def keep(requests: Sequence[WorkerRequest]) -> None:
        kept.append(requests[0].inputs[0].as_numpy())
        requests[0].respond([])

    bench.load(keep)
    with arena_with(LARGE) as (arena, span):
        bench.channel.send_with_fd(wire.Attach(7, 1 << 16, volatile=True), arena.region.fd)
        bench.send(wire.Execute(1, [request(1, span=span)]), wire.Execute(2, [request(2, span=span)]))
        assert "the model still uses an input in a client's shared memory" in bench.next(wire.Log).text
        bench.next(wire.Executed)
        bench.next(wire.Executed)
        os.pwrite(arena.region.fd, bytes(LARGE.nbytes), span.offset)
        assert kept[0].tolist() == [0] * 2048, "the client's memory itself"
        assert kept[1].tolist() == LARGE.tolist(), "a copy"
        kept.clear()
    bench.stop()
