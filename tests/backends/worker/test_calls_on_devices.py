"""Calls with tensors on a device by a whole worker, on the fake. The test plays the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from backends.transport import wire
from backends.worker.model_calls import CallRequest
from backends.worker.request import OutputValue
from kernel.errors import ArenaFull
from shm.cuda import BINDINGS_VARIABLE, cuda
from tests.backends.worker.threaded_worker import LOAD, Bench, request
from tests.fake_cuda import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from backends.worker.model_calls import ModelCall, ModelCalls
    from backends.worker.request import WorkerRequest

VALUES = np.arange(4096, dtype=np.float32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let workers of this process use the fake."""
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    runtime.forget_work()
    cuda.cache_clear()
    yield
    cuda.cache_clear()


def executing(bench: Bench, work: Callable[[ModelCalls, CallRequest], None]) -> None:
    """Let the worker of an instance on a GPU execute a request: `work` gets a call with an input on the device."""

    def execute(requests: Sequence[WorkerRequest]) -> None:
        assert bench.backend is not None
        host = bench.backend.host
        assert host.device is not None
        array = host.device.upload(VALUES, "FP32", VALUES.shape)
        work(host.calls, CallRequest("other", [OutputValue("IN", "FP32", array)]))
        requests[0].respond([])

    bench.hello()
    bench.send(msgspec.structs.replace(LOAD, kind="GPU", device_pool_byte_size=4 << 20))
    bench.next(wire.Loaded)
    assert bench.backend is not None
    bench.backend.on_execute = execute
    bench.send(wire.Execute(1, [request(1)]))


def ended(number: int) -> wire.CallResponded:
    return wire.CallResponded(number, True, wire.ResponseMessage())


@pytest.mark.usefixtures("device")
def test_a_call_that_comes_back_is_sent_again_with_inputs_on_the_host_and_so_are_later_ones(bench: Bench) -> None:
    def work(calls: ModelCalls, call: CallRequest) -> None:
        for _ in range(4):
            assert calls.wait(calls.start(call)).final

    executing(bench, work)
    assert bench.next(wire.DeviceArenaCreated).arena == -1
    places = []
    for number in range(1, 6):
        if number == 2:
            bench.next(wire.ArenaCreated)
        sent = bench.next(wire.Submit)
        (given,) = sent.request.inputs
        assert given.span is not None
        assert (sent.call, sent.parents, sent.blocking, sent.on_device) == (number, [1], True, True)
        places.append(given.span.lease.region_number)
        if number == 4:
            bench.send(wire.OnDeviceAgain())
        bench.send(wire.CallOnHost(1) if number == 1 else ended(number))
    assert places == [-1, wire.OUTPUT_ARENA, wire.OUTPUT_ARENA, wire.OUTPUT_ARENA, -1]
    bench.next(wire.Executed)


@pytest.mark.usefixtures("device")
def test_a_call_that_was_cancelled_and_comes_back_is_cancelled_under_its_new_number(bench: Bench) -> None:
    def work(calls: ModelCalls, call: CallRequest) -> None:
        sent = calls.start(call)
        calls.cancel(sent)
        calls.wait(sent)

    executing(bench, work)
    bench.next(wire.DeviceArenaCreated)
    bench.next(wire.Submit)
    assert bench.next(wire.CancelCall).call == 1
    bench.send(wire.CallOnHost(1))
    bench.next(wire.ArenaCreated)
    assert bench.next(wire.Submit).call == 2
    assert bench.next(wire.CancelCall).call == 2
    bench.send(ended(2))
    bench.next(wire.Executed)


@pytest.mark.usefixtures("device")
def test_a_call_that_comes_back_and_cannot_be_sent_again_has_the_error_as_its_response(bench: Bench) -> None:
    found: list[object] = []

    def work(calls: ModelCalls, call: CallRequest) -> None:
        sent: ModelCall = calls.start(call)
        call.inputs = [OutputValue("IN", "BYTES", np.array(["x" * (1 << 21)], object))]
        response = calls.wait(sent)
        found.extend((type(response.error), response.final, sent.ended))

    executing(bench, work)
    bench.next(wire.DeviceArenaCreated)
    bench.next(wire.Submit)
    bench.send(wire.CallOnHost(1))
    bench.next(wire.ArenaCreated)
    bench.next(wire.Executed)
    assert found == [ArenaFull, True, True]
