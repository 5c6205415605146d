"""The kernel: requests are resolved, checked, placed and queued, and answered exactly once."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kernel import errors
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.serving.catalog import ModelState
from kernel.serving.kernel import Kernel
from kernel.serving.model import Model
from kernel.serving.prepared import prepare
from kernel.serving.request import REQUEST_BYTE_SIZE, Request
from kernel.serving.response import Response
from kernel.serving.route import route_to
from kernel.testing import FakeClock, RecordingSink, model_spec
from shm.blocks import ByteBudget
from shm.region import RegionKind
from shm.tensor import ClientSpan, Tensor
from tests.kernel.kernel_bench import Bench
from tests.leased_tensor import leased_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.serving.kernel import Kernel


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def request(count: int = 1, **more: object) -> Request:
    tensor = Tensor("IN", "FP32", [count], bytes(4 * count))
    return Request("m", [tensor], RecordingSink(), **more)  # type: ignore[arg-type]


def responses(of: Request) -> list[Response]:
    assert isinstance(of.sink, RecordingSink)
    return of.sink.responses


def test_a_good_request_reaches_an_instance_and_is_answered_once(bench: Bench) -> None:
    sent = request()
    bench.kernel.submit(sent)
    assert len(bench.instance.batches) == 1
    assert bench.kernel.in_flight == 1
    sent.respond(Response("m", "1", "", outputs=[]))
    assert bench.kernel.in_flight == 0
    with pytest.raises(AssertionError):
        sent.respond(Response("m", "1", "", outputs=[]))
    assert len(responses(sent)) == 1


def refusal(kernel: Kernel, refused: Request, *given: Any, **options: Any) -> type:
    """Return the class of the error with which the kernel refuses a request: its only response."""
    kernel.submit(refused, *given, **options)
    [response] = responses(refused)
    assert response.refused
    assert response.final
    assert refused.finished
    return type(response.error)


def test_a_refusal_is_a_response_and_the_request_holds_nothing(bench: Bench) -> None:
    bad = request()
    bad.inputs[0].datatype = "INT32"
    assert issubclass(refusal(bench.kernel, bad), errors.InvalidArgument)
    assert bench.kernel.in_flight == 0
    assert refusal(bench.kernel, Request("unknown", [], RecordingSink())) is errors.ModelNotFound


def test_an_exception_while_a_request_is_submitted_is_a_refusal_too(bench: Bench) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    bench.model.submit = fail  # type: ignore[method-assign, assignment]
    assert refusal(bench.kernel, request()) is errors.InternalError
    assert bench.kernel.in_flight == 0


def test_large_inputs_are_copied_to_the_models_arena_and_freed_with_the_answer(bench: Bench) -> None:
    sent = request(5000)
    bench.kernel.submit(sent)
    span = sent.inputs[0].span
    assert span is not None
    assert span.lease.region.kind is RegionKind.ARENA
    assert sent.inputs[0].data is None
    assert bench.model.input_arena is not None
    assert bench.model.input_arena.allocator.block_count == 1
    sent.fail(errors.InternalError("no"))
    assert bench.model.input_arena.allocator.block_count == 0


def test_a_request_that_does_not_fit_into_the_arena_is_refused_at_once(bench: Bench) -> None:
    assert refusal(bench.kernel, request(1 << 19)) is errors.ArenaFull


def bench_with_queue(budget: ByteBudget) -> Bench:
    """Return a bench whose instance has a request, so that others are queued."""
    bench = Bench(budget)
    bench.kernel.submit(request())
    assert budget.used_byte_size == 0, "it is not queued"
    return bench


def test_queued_requests_count_in_the_budget_until_their_final_response() -> None:
    budget = ByteBudget(10_000)
    bench = bench_with_queue(budget)
    first = request(100)
    form = prepare(first, route_to(bench.model))
    bench.kernel.submit(first, route=route_to(bench.model))
    assert budget.used_byte_size == REQUEST_BYTE_SIZE + 400
    second = form.with_inputs(request(100).inputs, "", RecordingSink())
    bench.kernel.submit(second, form)
    assert budget.used_byte_size == 2 * (REQUEST_BYTE_SIZE + 400)
    first.respond(Response("m", "1", "", outputs=[], final=False))
    assert budget.used_byte_size == 2 * (REQUEST_BYTE_SIZE + 400)
    for each in (first, second):
        each.fail(errors.InternalError("no"))
    assert budget.used_byte_size == 0
    bench.close()


def text_request(**texts: object) -> Request:
    made = request(1)
    for name, value in texts.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("texts", "least"),
    [
        ({"id": "i" * 15_000}, 15_000),
        ({"id": "i" * 15_000 + "\U0001f600"}, 60_000),
        ({"parameters": {"p" * 7000: "v" * 8000}}, 15_000),
        ({"parameters": {str(number): number for number in range(1000)}}, 100_000),
        ({"correlation_id": "c" * 15_000}, 15_000),
    ],
    ids=["id", "wide_id", "long_parameters", "many_parameters", "correlation_id"],
)
def test_the_texts_of_a_queued_request_count_in_the_budget(texts: dict[str, object], least: int) -> None:
    budget = ByteBudget(1_000_000)
    bench = bench_with_queue(budget)
    queued = text_request(**texts)
    bench.kernel.submit(queued)
    assert least < budget.used_byte_size < 3 * least
    queued.fail(errors.InternalError("no"))
    assert budget.used_byte_size == 0
    bench.close()


def test_a_queued_request_does_not_keep_the_message_of_which_its_tensor_was_a_part() -> None:
    bench = bench_with_queue(ByteBudget(1_000_000))
    message = bytearray(16_000)
    queued = request(1)
    queued.inputs[0].data = memoryview(message)[:4]
    bench.kernel.submit(queued)
    message.clear()  # nothing refers to its memory
    assert queued.inputs[0].data == bytes(4)
    bench.close()


def test_small_requests_are_refused_while_queued_ones_fill_the_budget() -> None:
    budget = ByteBudget(10_000)
    bench = bench_with_queue(budget)
    accepted = [request(1) for _ in range(10)]
    for each in accepted:
        bench.kernel.submit(each)
    assert refusal(bench.kernel, request(1)) is errors.MemoryFull
    assert budget.used_byte_size == 10 * (REQUEST_BYTE_SIZE + 4)
    bench.kernel.submit(request(1), pinned=bench.model)
    assert budget.used_byte_size == 10 * (REQUEST_BYTE_SIZE + 4), "its parent has paid for it"
    accepted[0].fail(errors.InternalError("no"))
    bench.kernel.submit(request(1))
    bench.close()
    assert budget.used_byte_size == 0


def test_a_request_that_its_model_refuses_does_not_count_in_the_budget() -> None:
    budget = ByteBudget(10_000)
    bench = Bench(budget)
    bench.model.refuse(errors.Unavailable("no instance"))
    assert refusal(bench.kernel, request()) is errors.Unavailable
    assert budget.used_byte_size == 0
    bench.close()


def test_regions_are_leased_until_the_answer_and_an_unknown_one_wins_over_other_faults(bench: Bench) -> None:
    path = Path("/dev/shm", f"naiad_test_{uuid.uuid4().hex}")
    path.write_bytes(bytes(64))
    try:
        bench.regions.register_system("r", f"/{path.name}", 0, 64)
    finally:
        path.unlink()
    tensor = Tensor("IN", "FP32", [16], client_span=ClientSpan("r", 64))
    sent = Request("m", [tensor], RecordingSink())
    bench.kernel.submit(sent)
    assert tensor.span is not None
    assert tensor.span.lease.region.lease_count == 1
    sent.fail(errors.InternalError("no"))
    assert tensor.span.lease.region.lease_count == 0
    both_wrong = Request("m", [Tensor("IN", "INT8", [16], client_span=ClientSpan("s", 64))], RecordingSink())
    assert refusal(bench.kernel, both_wrong) is errors.RegionNotFound


def test_a_cancelled_request_is_taken_from_the_queue_or_told_to_its_instance(bench: Bench) -> None:
    running, waiting = request(), request()
    bench.kernel.submit(running)
    bench.kernel.submit(waiting)
    bench.kernel.cancel(running)
    bench.kernel.cancel(waiting)
    assert bench.instance.cancelled == [running]
    assert [type(r.error) for r in responses(waiting)] == [errors.RequestCancelled]
    assert responses(running) == []
    assert bench.model.live.queued == 0


def test_a_stopping_kernel_refuses_and_waits_for_what_it_accepted(bench: Bench) -> None:
    async def main() -> None:
        sent = request()
        bench.kernel.submit(sent)
        draining = asyncio.create_task(bench.kernel.drain())
        await asyncio.sleep(0)
        assert refusal(bench.kernel, request()) is errors.ServerStopping
        with pytest.raises(errors.Unavailable, match="^Server exiting$"):
            bench.kernel.live()
        assert not draining.done()
        sent.respond(Response("m", "1", "", outputs=[]))
        await draining

    asyncio.run(main())


def test_a_scheduler_that_fails_answers_its_queue_and_is_replaced() -> None:
    async def fragile(*arguments: object) -> None:
        inbox = arguments[1]
        await inbox.next()  # type: ignore[attr-defined]
        await inbox.next()  # type: ignore[attr-defined]
        raise RuntimeError("no")

    bench = Bench()
    model = Model(model_spec("m", dims=(-1,)), ModelConfig(), 1, fragile, FakeClock())  # type: ignore[arg-type]
    model.start()
    bench.catalog.set_state("m", 1, ModelState.READY, "", model)
    first, second = request(), request()
    bench.kernel.submit(first)
    bench.kernel.submit(second)
    for sent in (first, second):
        assert "the scheduler of model 'm' failed" in str(responses(sent)[0].error)
    bench.kernel.submit(request())  # the new scheduler has it
    assert model.in_flight == 1
    model.close(errors.ServerStopping(""))
    bench.close()


@pytest.mark.parametrize(
    ("allowed", "local", "refused"),
    [("local", True, False), ("local", False, True), ("true", False, False), ("false", True, True)],
)
def test_who_may_register_shared_memory(allowed: str, local: bool, refused: bool) -> None:
    bench = Bench(allow_client_shm=allowed)
    if refused:
        with pytest.raises(errors.ClientSharedMemoryDisabled):
            bench.kernel.check_client_shm(local_peer=local)
    else:
        bench.kernel.check_client_shm(local_peer=local)
    bench.close()


def test_strict_readiness_wants_living_instances(bench: Bench) -> None:
    assert bench.kernel.ready()
    bench.model.instances.lost(bench.instance, [])
    assert not bench.kernel.ready()
    assert not bench.kernel.model_ready("m")
    lenient = Bench(strict_readiness=False)
    lenient.model.instances.lost(lenient.instance, [])
    assert lenient.kernel.ready()
    lenient.close()


@pytest.mark.parametrize("prepared", [False, True])
def test_a_request_that_is_refused_keeps_no_lease(bench: Bench, prepared: bool) -> None:
    released: list[str] = []
    given = leased_tensor("IN", "FP32", [2], bytes(8), lambda: released.append("it"))
    large = Tensor("IN", "FP32", [1 << 20], bytes(4 << 20))
    first = request()
    bench.kernel.submit(first)
    form = prepare(msgspec.structs.replace(first, inputs=[large]), route_to(bench.model)) if prepared else None
    refused = Request("m", [given, large], RecordingSink())
    refusal(bench.kernel, refused, form)
    assert released == ["it"]
    assert bench.kernel.in_flight == 1


def test_an_output_of_another_model_is_given_back_with_the_final_response(bench: Bench) -> None:
    released: list[str] = []
    given = leased_tensor("IN", "FP32", [2], bytes(8), lambda: released.append("it"))
    sent = Request("m", [given], RecordingSink())
    bench.kernel.submit(sent)
    assert sent.leased
    assert released == []
    sent.respond(Response("m", "1", "", outputs=[]))
    assert released == ["it"]
