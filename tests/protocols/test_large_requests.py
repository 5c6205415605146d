"""Work that a helper does: its memory, its leases, and what its caller learns, also when things go wrong."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kernel.errors import ArenaFull, InternalError, InvalidArgument, MemoryFull, RequestCancelled, ServerStopping
from kernel.serving.request import NO_SINK, Request
from kernel.serving.response import peer_of_sink
from kernel.testing import model_spec
from protocols.large_requests import (
    MAX_DESCRIPTION_BYTE_SIZE,
    AwaitedTask,
    RequestTask,
    TensorBytes,
    decode_steps,
    describe,
    sources_of,
)
from shm.tensor import ClientSpan, RequestedOutput, Tensor
from tests.protocols.front_door_lab import FrontDoorLab, LateHelpers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.errors import ServingError
    from kernel.serving.helper_tasks import HelperTask, TaskResult, TaskSteps
    from kernel.serving.response import Response
    from kernel.serving.route import ModelRoute


class Caller:
    def __init__(self) -> None:
        self.options: bytes | None = None
        self.error: ServingError | None = None

    def prepared(self, response_options: bytes, route: ModelRoute) -> None:
        self.options = response_options

    def refused(self, error: ServingError) -> None:
        self.error = error


class Bench:
    """A model with one input of any number of FP32, and a task for a request to it."""

    def __init__(self, arena_byte_size: int = 1 << 20) -> None:
        self.lab = FrontDoorLab(arena_byte_size=arena_byte_size)
        self.lab.add_model(model_spec(dims=(-1,)), lambda request: None)
        self.kernel = self.lab.kernel
        self.kernel.helpers = LateHelpers()  # never runs a task: `run` does it
        self.model = self.kernel.resolve("model")
        self.request = Request("model", [], NO_SINK)
        self.caller = Caller()
        self.source = self.kernel.memory_for_helper(5000)
        source = Tensor("", "UINT8", [5000], None, self.source.span)
        self.task = RequestTask(self.kernel, self.kernel.route("model"), self.request, self.caller, "n", b"", [source])

    @property
    def blocks(self) -> int:
        """Blocks of both arenas that are in use."""
        arenas = [self.model.input_arena, self.kernel._inputs._message_arena]
        return sum(arena.allocator.block_count for arena in arenas if arena is not None)

    def run(self, steps: TaskSteps) -> None:
        """Do what a helper does."""
        try:
            span = self.task.needs_memory(next(steps))
        except InvalidArgument as error:
            self.task.failed(error)
            return
        try:
            steps.send(span.lease.region.view(span.offset, span.byte_size))
        except StopIteration as stop:
            self.task.done(stop.value.message, None)


def steps(
    datatype: str, shape: list[int], most: int, write: Callable[[memoryview], int], **fields: object
) -> TaskSteps:
    request = Request("model", [Tensor("IN", datatype, shape, b"")], NO_SINK, **fields)  # type: ignore[arg-type]
    return decode_steps(request, [TensorBytes(most, write)], b"options")


def fill(memory: memoryview) -> int:
    memory[:] = bytes(range(len(memory)))
    return len(memory)


def test_a_decoded_request_has_its_fields_and_its_tensors_in_memory_of_the_model() -> None:
    bench = Bench()
    bench.task.start()
    assert bench.kernel.in_flight == 1, "it is admitted"
    fields = {"id": "7", "priority": 3, "timeout_us": 4, "parameters": {"p": 1.5}, "sequence_start": True}
    bench.run(steps("FP32", [4], 16, fill, correlation_id="c", outputs=[RequestedOutput("OUT", 2)], **fields))
    request, (tensor,) = bench.request, bench.request.inputs
    assert (bench.caller.options, bench.caller.error) == (b"options", None)
    assert {name: getattr(request, name) for name in fields} == fields
    assert (request.correlation_id, request.outputs) == ("c", [RequestedOutput("OUT", 2)])
    assert tensor.span is not None
    assert tensor.span.lease.region is bench.model.input_arena.region  # type: ignore[union-attr]
    assert bytes(tensor.raw()) == bytes(range(16))
    assert (bench.blocks, bench.kernel.in_flight) == (1, 0)
    request.release_leases()
    assert bench.blocks == 0


def test_a_tensor_of_which_only_the_largest_size_was_known_is_cut() -> None:
    bench = Bench()
    bench.lab.add_model(model_spec("model", dims=(1,)), lambda request: None)
    bench.task.start()

    def write(memory: memoryview) -> int:
        memory[:4] = b"abcd"
        return 4

    # The shape is checked when the request is submitted: what the model has is FP32.
    with pytest.raises(InvalidArgument, match="input byte size mismatch"):
        bench.task.needs_memory(next(steps("FP32", [2], 100, write)))
    bench.task.failed(RequestCancelled())
    assert bench.blocks == 0
    bench = Bench()
    bench.kernel.check_shapes = lambda request, route: None  # type: ignore[method-assign]
    bench.task.start()
    bench.run(steps("BYTES", [1], 100, write))
    assert bytes(bench.request.inputs[0].raw()) == b"abcd"


def test_a_request_with_wrong_shapes_is_refused_before_its_elements_are_decoded() -> None:
    bench = Bench()
    bench.task.start()
    bench.run(steps("FP32", [2, 2], 16, lambda memory: pytest.fail("decoded")))
    assert bench.caller.error is not None
    assert "unexpected shape for input 'IN'" in bench.caller.error.message
    assert (bench.blocks, bench.kernel.in_flight) == (0, 0)


def test_a_request_without_memory_is_refused() -> None:
    bench = Bench(arena_byte_size=1 << 14)
    bench.task.start()
    with pytest.raises(ArenaFull) as raised:
        bench.task.needs_memory(next(steps("FP32", [8000], 32_000, fill)))
    bench.task.failed(raised.value)
    assert bench.caller.error is raised.value
    assert (bench.blocks, bench.kernel.in_flight) == (0, 0)


def test_a_cancelled_request_keeps_its_memory_until_the_helper_has_ended() -> None:
    bench = Bench()
    bench.task.start()
    decoding = steps("FP32", [4], 16, fill)
    span = bench.task.needs_memory(next(decoding))
    bench.task.cancel()
    assert bench.blocks == 2, "the helper may still read and write"
    with pytest.raises(StopIteration) as stop:
        decoding.send(span.lease.region.view(span.offset, span.byte_size))
    result: TaskResult = stop.value.value
    bench.task.done(result.message, None)
    assert (bench.caller.options, bench.caller.error) == (None, None)
    assert (bench.blocks, bench.kernel.in_flight) == (0, 0)


def test_a_request_that_was_cancelled_before_it_was_decoded_gets_no_memory() -> None:
    bench = Bench()
    bench.task.start()
    bench.task.cancel()
    with pytest.raises(RequestCancelled):
        bench.task.needs_memory(next(steps("FP32", [4], 16, fill)))
    bench.task.failed(RequestCancelled())
    assert (bench.caller.error, bench.blocks) == (None, 0)


def test_no_request_is_admitted_while_the_server_stops() -> None:
    bench = Bench()
    bench.kernel.stopping = True
    with pytest.raises(ServerStopping):
        bench.task.start()
    assert (bench.blocks, bench.kernel.in_flight) == (0, 0)


def test_the_model_may_be_found_by_the_helper() -> None:
    bench = Bench()
    request = Request("", [], NO_SINK)
    bench.task = RequestTask(bench.kernel, None, request, bench.caller, "n", b"", [])
    bench.task.start()
    bench.run(steps("FP32", [4], 16, fill))
    assert (request.model_name, request.inputs[0].byte_size) == ("model", 16)


def test_an_input_in_a_region_of_a_client_has_no_bytes_in_the_result() -> None:
    bench = Bench()
    bench.kernel.check_shapes = lambda request, route: None  # type: ignore[method-assign]
    bench.task.start()
    named = Tensor("A", "FP32", [4], None, None, ClientSpan("region", 16, 8))
    request = Request("model", [named, Tensor("IN", "FP32", [4], b"")], NO_SINK)
    bench.run(decode_steps(request, [None, TensorBytes(16, fill)]))
    first, second = bench.request.inputs
    assert (first.client_span, first.span) == (ClientSpan("region", 16, 8), None)
    assert bytes(second.raw()) == bytes(range(16))


def test_a_description_that_is_too_long_is_refused() -> None:
    request = Request("model", [], NO_SINK, parameters={"p": "x" * MAX_DESCRIPTION_BYTE_SIZE})
    with pytest.raises(InvalidArgument, match=f"take 10486.. bytes, expected at most {MAX_DESCRIPTION_BYTE_SIZE}"):
        describe(request, [])


def test_sources_are_inline_in_the_buffer_that_a_message_was_received_in_or_copied() -> None:
    bench = Bench()
    (inline,) = sources_of(bench.kernel, b"small", None)
    assert (inline.data, inline.span) == (b"small", None)
    (copied,) = sources_of(bench.kernel, bytes(range(256)) * 300, None)
    assert copied.data is None
    assert bytes(copied.raw()) == bytes(range(256)) * 300
    buffer = bench.kernel.receive_buffer(bench.kernel.route("model"), 100_000, 0)
    assert buffer is not None
    buffer.view[:3] = b"abc"
    (there,) = sources_of(bench.kernel, buffer.view, buffer)
    buffer.release()
    assert bytes(there.raw()[:3]) == b"abc", "it has a lease of its own"
    for each in (copied, there):
        each.release()
    assert bench.blocks == 1, "that of the task"


class Gone:
    @property
    def peer(self) -> str:
        raise RequestCancelled

    def header(self, name: str) -> str:
        return ""

    def send(self, response: object) -> None:
        raise AssertionError("nobody waits")


class Known(Gone):
    peer = "user 7"


def test_a_task_belongs_to_the_peer_that_waits_for_it() -> None:
    assert peer_of_sink(Known()) == "user 7"
    assert peer_of_sink(Gone()) == "", "its task is cancelled soon"
    assert Bench().task.peer == ""


def test_long_parameters_count_as_memory_of_the_request_until_it_has_ended() -> None:
    bench = Bench()
    bench.task.start()
    span = bench.task.needs_memory(next(steps("FP32", [4], 16, fill, parameters={"p": "x" * 100_000})))
    assert span.byte_size >= 100_016
    bench.task.failed(RequestCancelled())
    assert bench.blocks == 0


def test_a_request_that_waits_for_a_helper_counts_in_the_memory_of_all_requests() -> None:
    bench = Bench()
    budget = bench.kernel.budget
    before = budget.used_byte_size
    source = Tensor("", "UINT8", [60_000], bytes(60_000))
    task = RequestTask(
        bench.kernel, bench.kernel.route("model"), Request("model", [], NO_SINK), bench.caller, "n", b"", [source]
    )
    task.start()
    assert budget.used_byte_size >= before + 60_000
    task.failed(RequestCancelled())
    assert budget.used_byte_size == before


def test_a_request_that_needs_a_helper_is_refused_while_all_memory_is_in_use() -> None:
    bench = Bench()
    budget = bench.kernel.budget
    others = budget.limit_byte_size - budget.used_byte_size - 1000
    budget.add(others)
    with pytest.raises(MemoryFull):
        bench.task.start()
    budget.remove(others)
    assert bench.blocks == 0
    assert bench.kernel.in_flight == 0


class Helpers(LateHelpers):
    """Keeps the tasks for the test, which does what a helper does."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[HelperTask] = []

    def add(self, task: HelperTask) -> None:
        self.tasks.append(task)


class Lab(FrontDoorLab):
    def __init__(self) -> None:
        super().__init__()
        self.given = Helpers()
        self.kernel.helpers = self.given
        self.requests: list[Request] = []
        self.add_model(model_spec(dims=(-1,)), self.requests.append)

    def source(self) -> Tensor:
        return Tensor("", "UINT8", [5000], None, self.kernel.memory_for_helper(5000).span)

    @property
    def block_count(self) -> int:
        arenas = [self.kernel.resolve("model").input_arena, self.kernel._inputs._message_arena]
        return sum(arena.allocator.block_count for arena in arenas if arena is not None)


def run(test: Callable[[Lab], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await test(Lab())

    asyncio.run(main())


def test_a_task_returns_its_result_and_releases_its_sources() -> None:
    async def test(lab: Lab) -> None:
        task = AwaitedTask(
            lab.kernel, "n", b"", [lab.source()], lambda message: lab.kernel.memory_for_helper(len(message))
        )
        running = asyncio.ensure_future(task.run())
        await asyncio.sleep(0)
        span = task.needs_memory(b"12345")
        assert (span.byte_size, lab.block_count) == (5, 2)
        task.done(b"result", None)
        assert await running == (b"result", None)
        assert task.memory is not None
        task.memory.release()
        assert lab.block_count == 0

    run(test)


def test_a_task_raises_its_error_and_releases_everything() -> None:
    async def test(lab: Lab) -> None:
        task = AwaitedTask(lab.kernel, "n", b"", [lab.source()], lambda message: lab.kernel.memory_for_helper(10))
        running = asyncio.ensure_future(task.run())
        await asyncio.sleep(0)
        task.needs_memory(b"")
        task.failed(InvalidArgument("wrong"))
        with pytest.raises(InvalidArgument, match="wrong"):
            await running
        assert lab.block_count == 0

    run(test)


@pytest.mark.parametrize("when", ["before its memory", "before its result", "with its result"])
def test_what_nobody_waits_for_is_released_when_the_helper_has_ended(when: str) -> None:
    async def test(lab: Lab) -> None:
        task = AwaitedTask(lab.kernel, "n", b"", [lab.source()], lambda message: lab.kernel.memory_for_helper(10))
        output = lab.source()
        running = asyncio.ensure_future(task.run())
        await asyncio.sleep(0)
        if when == "with its result":
            task.needs_memory(b"")
            task.done(b"", output)
            running.cancel()
        else:
            if when == "before its result":
                task.needs_memory(b"")
            running.cancel()
            await asyncio.sleep(0)
            assert lab.block_count >= 2, "the helper may use the memory"
            if when == "before its memory":
                with pytest.raises(RequestCancelled):
                    task.needs_memory(b"")
                output.release()
                task.failed(RequestCancelled())
            else:
                task.done(b"", output)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert lab.block_count == 0

    run(test)


def test_a_task_without_memory_of_the_server_gets_none() -> None:
    async def test(lab: Lab) -> None:
        task = AwaitedTask(lab.kernel, "n", b"", [])
        with pytest.raises(InternalError, match="task n needs no memory of the server"):
            task.needs_memory(b"")

    run(test)


class Sink:
    peer = ""

    def header(self, name: str) -> str:
        return ""

    def send(self, response: Response) -> None:
        response.release()
