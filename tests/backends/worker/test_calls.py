"""Calls of other models by a whole worker. The test plays the kernel."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.transport import wire
from backends.worker.model_calls import CallRequest
from backends.worker.request import OutputValue
from kernel.errors import ErrorCode, InternalError, InvalidArgument, NotFound
from shm.arena import Arena
from shm.lease import RegionNumber
from shm.tensor import Span, Tensor
from tests.backends.worker.threaded_worker import LARGE, Bench, RespondingLater, Scripted, request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.worker.model_calls import ModelCalls
    from backends.worker.request import WorkerRequest

#: Long enough that a worker looks whether the model has changed it.
LONG = np.arange(1 << 15, dtype=np.float32)
SMALL = OutputValue("IN", "INT32", np.arange(3, dtype=np.int32))


def loaded(bench: Bench, work: Callable[[ModelCalls, Sequence[WorkerRequest]], None], **more: type[Scripted]) -> None:
    """Load a model that does `work`, and then responds without outputs."""

    def execute(requests: Sequence[WorkerRequest]) -> None:
        assert bench.backend is not None
        work(bench.backend.host.calls, requests)
        for each in requests:
            if not each.finished:
                each.respond([])

    bench.load(execute, **more)


def next_two(bench: Bench) -> list[wire.Message]:
    """Return the worker's next two messages, of any kind."""
    return [bench.next(wire.Message), bench.next(wire.Message)]


def result(value: int, call: int = 1, *, final: bool = True) -> wire.CallResponded:
    """Return a small response."""
    tensor = Tensor("OUT", "INT32", [1], np.int32(value).tobytes())
    return wire.CallResponded(call, final, wire.ResponseMessage([tensor], {"p": value}))


def test_a_call_of_the_main_thread_is_for_all_requests_of_the_batch_and_blocks(bench: Bench) -> None:
    found: list[object] = []

    def work(calls: ModelCalls, requests: Sequence[WorkerRequest]) -> None:
        call = calls.start(CallRequest("other", [SMALL], "3", ["OUT"], "id", 7, 1, 0, 9, {"a": 1}))
        response = calls.wait(call)
        found.extend((response.outputs[0].as_numpy().tolist(), response.parameters, response.final))

    loaded(bench, work)
    bench.send(wire.Execute(1, [request(1), request(2)]))
    sent = bench.next(wire.Submit)
    assert (sent.call, sent.model_name, sent.model_version) == (1, "other", "3")
    assert (sent.parents, sent.blocking, sent.streaming) == ([1, 2], True, False)
    ref = sent.request
    assert (ref.id, ref.correlation_id, ref.flags, ref.timeout_us, ref.parameters) == ("id", 7, 1, 9, {"a": 1})
    assert [output.name for output in ref.outputs] == ["OUT"]
    assert ref.inputs == [Tensor("IN", "INT32", [3], SMALL.array.tobytes())]
    bench.send(result(5))
    bench.next(wire.Executed)
    assert found == [[5], {"p": 5}, True]


@pytest.mark.parametrize(("code", "kind"), [(ErrorCode.NOT_FOUND, NotFound), (ErrorCode.INTERNAL, InternalError)])
def test_an_error_of_the_called_model_is_in_the_response(bench: Bench, code: ErrorCode, kind: type) -> None:
    found: list[object] = []

    def work(calls: ModelCalls, requests: Sequence[WorkerRequest]) -> None:
        response = calls.wait(calls.start(CallRequest("other", [])))
        found.append(response.error)

    loaded(bench, work)
    bench.send(wire.Execute(1, [request(1)]))
    bench.next(wire.Submit)
    bench.send(wire.CallResponded(1, True, wire.ResponseMessage(error_code=code.value, error_text="no")))
    bench.next(wire.Executed)
    (error,) = found
    assert isinstance(error, kind)
    assert str(error) == "no"


def test_an_input_of_the_request_is_named_where_it_lies_and_an_own_array_is_copied_once(bench: Bench) -> None:
    with Arena("inputs", 1 << 16) as arena:
        block = arena.take(LARGE.nbytes)
        assert block is not None
        block.view()[:] = LARGE.tobytes()

        def work(calls: ModelCalls, requests: Sequence[WorkerRequest]) -> None:
            given = requests[0].inputs[0].as_numpy()
            values = [given, given[512:], given * 2]
            calls.wait(
                calls.start(CallRequest("other", [OutputValue(str(n), "FP32", v) for n, v in enumerate(values)]))
            )

        loaded(bench, work)
        bench.channel.send_with_fd(wire.Attach(7, 1 << 16), arena.region.fd)
        place = Span(RegionNumber(7), block.offset, LARGE.nbytes)
        bench.send(wire.Execute(1, [request(1, span=place)]))
        bench.next(wire.ArenaCreated)
        whole, part, own = bench.next(wire.Submit).request.inputs
        assert whole.span is not None
        assert part.span is not None
        assert own.span is not None
        assert (whole.span.lease.region_number, whole.span.offset) == (7, block.offset)
        assert (part.span.lease.region_number, part.span.offset) == (7, block.offset + 2048)
        assert own.span.lease.region_number == wire.OUTPUT_ARENA
        bench.send(result(1))
        executed = bench.next(wire.Executed)
        assert (executed.copies, executed.copied_byte_size) == (1, LARGE.nbytes)
        block.release()


def test_an_instance_that_calls_its_own_model_gives_copies(bench: Bench) -> None:
    with Arena("inputs", 1 << 16) as arena:

        def work(calls: ModelCalls, requests: Sequence[WorkerRequest]) -> None:
            calls.wait(calls.start(CallRequest("m", [OutputValue("IN", "FP32", requests[0].inputs[0].as_numpy())])))

        loaded(bench, work)
        bench.channel.send_with_fd(wire.Attach(7, 1 << 16), arena.region.fd)
        bench.send(wire.Execute(1, [request(1, span=Span(RegionNumber(7), 0, LARGE.nbytes))]))
        bench.next(wire.ArenaCreated)
        (given,) = bench.next(wire.Submit).request.inputs
        assert given.span is not None
        assert given.span.lease.region_number == wire.OUTPUT_ARENA
        bench.send(result(1))
        bench.next(wire.Executed)


def test_a_result_in_the_memory_of_another_worker_is_released_when_the_model_drops_it(bench: Bench) -> None:
    kept: list[object] = []
    seen: list[object] = []

    def work(calls: ModelCalls, requests: Sequence[WorkerRequest]) -> None:
        if kept:
            kept.clear()
            return
        response = calls.wait(calls.start(CallRequest("other", [])))
        array = response.outputs[0].as_numpy()
        array += 1  # nobody else sees it
        seen.append(array[:3].tolist())
        kept.append(array[5:])
        again = calls.start(CallRequest("third", [OutputValue("IN", "FP32", response.outputs[1].as_numpy())]))
        calls.wait(again)

    with Arena("outputs", 1 << 20) as arena:
        blocks = [arena.take(LONG.nbytes), arena.take(LONG.nbytes)]
        tensors = []
        for name, block in zip("AB", blocks, strict=True):
            assert block is not None
            block.view()[:] = LONG.tobytes()
            place = Span(RegionNumber(9), block.offset, LONG.nbytes)
            tensors.append(Tensor(name, "FP32", [len(LONG)], None, place))
        loaded(bench, work)
        bench.send(wire.Execute(1, [request(1)]))
        bench.next(wire.Submit)
        attach = wire.Attach(9, 1 << 20, 0, False, False)
        bench.channel.send_with_fd(attach, arena.region.fd)
        bench.send(wire.CallResponded(1, True, wire.ResponseMessage(tensors), 4))
        (given,) = bench.next(wire.Submit).request.inputs
        assert given.span is not None
        assert (given.span.lease.region_number, given.span.offset) == (9, tensors[1].span.offset)  # type: ignore[union-attr]
        bench.send(result(1, 2))
        messages = next_two(bench)
        assert wire.Released([5]) in messages
        bench.send(wire.Execute(2, [request(2)]))
        messages = next_two(bench)
        assert wire.Released([4]) in messages
        assert seen == [[1, 2, 3]]
        assert blocks[0] is not None
        assert bytes(blocks[0].view()[:4]) == bytes(4), "what the model changed is its own"
        for block in blocks:
            assert block is not None
            block.release()


def test_strings_of_another_worker_are_checked_in_a_copy(bench: Bench) -> None:
    found: list[object] = []

    def work(calls: ModelCalls, requests: Sequence[WorkerRequest]) -> None:
        response = calls.wait(calls.start(CallRequest("other", [])))
        found.append(response.error)

    with Arena("outputs", 1 << 16) as arena:
        loaded(bench, work)
        bench.send(wire.Execute(1, [request(1)]))
        bench.next(wire.Submit)
        attach = wire.Attach(9, 1 << 16, 0, False, False)
        bench.channel.send_with_fd(attach, arena.region.fd)
        wrong = Tensor("A", "BYTES", [3], None, Span(RegionNumber(9), 0, 5000))
        bench.send(wire.CallResponded(1, True, wire.ResponseMessage([wrong]), 1))
        messages = next_two(bench)
        assert wire.Released([1]) in messages
        assert isinstance(found[0], InvalidArgument)


def test_a_stream_gives_credit_in_portions(bench: Bench) -> None:
    taken: list[object] = []

    def work(calls: ModelCalls, requests: Sequence[WorkerRequest]) -> None:
        call = calls.start(CallRequest("other", [], streaming=True))
        while True:
            response = calls.wait(call)
            taken.append(response.empty)
            if response.final:
                return

    loaded(bench, work)
    bench.send(wire.Execute(1, [request(1)]))
    assert bench.next(wire.Submit).streaming
    bench.send(*(result(number, final=False) for number in range(40)))
    assert bench.next(wire.CallConsumed) == wire.CallConsumed(1, 16)
    assert bench.next(wire.CallConsumed) == wire.CallConsumed(1, 16)
    bench.send(wire.CallResponded(1, True))
    bench.next(wire.Executed)
    assert taken == [False] * 40 + [True]


def test_batches_that_wait_behind_a_call_are_given_back(bench: Bench) -> None:
    def work(calls: ModelCalls, requests: Sequence[WorkerRequest]) -> None:
        calls.wait(calls.start(CallRequest("other", [])))

    loaded(bench, work)
    bench.send(wire.Execute(1, [request(1)]), wire.Execute(2, [request(2)]), wire.Execute(3, [request(3)]))
    bench.next(wire.Submit)
    bench.send(wire.Recall())
    assert bench.next(wire.Recalled) == wire.Recalled([2, 3])
    bench.send(result(1))
    assert bench.next(wire.Executed).batch == 1
    bench.send(wire.Execute(4, [request(4)]))
    assert bench.next(wire.Submit).parents == [4]
    bench.send(result(1, 2))
    assert bench.next(wire.Executed).batch == 4


def test_a_thread_calls_also_when_the_model_executes_nothing(bench: Bench) -> None:
    found: list[int] = []
    threads: list[threading.Thread] = []

    def work(calls: ModelCalls, requests: Sequence[WorkerRequest]) -> None:
        def run() -> None:
            response = calls.wait(calls.start(CallRequest("other", [])))
            found.append(int(response.outputs[0].as_numpy()[0]))

        bench_thread = threading.Thread(target=run)
        threads.append(bench_thread)
        requests[0].respond([])
        go.append(bench_thread)

    go: list[threading.Thread] = []
    loaded(bench, work, kind=RespondingLater)
    bench.send(wire.Execute(1, [request(1)]))
    bench.next(wire.Executed)
    go[0].start()
    sent = bench.next(wire.Submit)
    assert (sent.parents, sent.blocking) == ([], False)
    bench.send(result(8))
    go[0].join(60)
    assert found == [8]


def test_files_of_a_model_are_sent_in_parts(bench: Bench) -> None:
    found: list[object] = []

    def work(calls: ModelCalls, requests: Sequence[WorkerRequest]) -> None:
        files = {"file:1/a": bytes((1 << 20) + 5), "file:1/b": b""}
        found.append(calls.control("load", "other", config="{}", files=files))
        try:
            calls.control("unload", "other", unload_dependents=True)
        except NotFound as error:
            found.append(error.message)

    loaded(bench, work)
    bench.send(wire.Execute(1, [request(1)]))
    parts = [bench.next(wire.ModelFile) for _ in range(3)]
    assert [(part.path, len(part.data)) for part in parts] == [("file:1/a", 1 << 20), ("file:1/a", 5), ("file:1/b", 0)]
    assert bench.next(wire.ControlModel) == wire.ControlModel(1, "load", "other", "", "{}", False)
    bench.send(wire.ModelControlled(1, True))
    assert bench.next(wire.ControlModel) == wire.ControlModel(2, "unload", "other", "", None, True)
    bench.send(wire.ModelControlled(2, False, "not_found", "none"))
    bench.next(wire.Executed)
    assert found == [True, "none"]


def test_a_stream_that_the_model_drops_is_cancelled_once(bench: Bench) -> None:
    def work(calls: ModelCalls, _: Sequence[WorkerRequest]) -> None:
        sent = calls.start(CallRequest("other", [SMALL], streaming=True))
        calls.discard(sent)
        calls.discard(sent)

    loaded(bench, work)
    bench.send(wire.Execute(1, [request(1)]))
    bench.next(wire.Submit)
    assert bench.next(wire.CancelCall).call == 1
    bench.next(wire.Executed)
    bench.send(wire.CallResponded(1, True))
