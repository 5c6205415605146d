"""Requests of a model with a cache: answered from it, or executed and stored; each exactly once.

One file, because its tests share the doubles that it begins with.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from kernel import errors
from kernel.cache.interface import CachedResponse
from kernel.cache.lookup import HASHED_AT_ONCE, CacheAccess
from kernel.serving.response import Response
from shm.region import RegionKind
from shm.tensor import ClientSpan, RequestedOutput, Tensor
from tests.kernel.cache.caching_bench import CachingBench, SlowCache, data_of, responses, settled
from tests.kernel.repository_lab import until

Scenario = Callable[[CachingBench], Awaitable[None]]

LARGE = bytes(range(256)) * (HASHED_AT_ONCE // 256) + b"more"


def run(scenario: Scenario, bench: CachingBench | None = None) -> None:
    async def main() -> None:
        case = bench or CachingBench()
        await case.load()
        async with asyncio.timeout(60):
            await scenario(case)
            await settled()
            case.kernel.check()
            await case.close()

    asyncio.run(main())


# ---- hits and misses -----------------------------------------------------------------------------


def test_an_equal_request_is_answered_at_once_and_not_executed() -> None:
    async def scenario(case: CachingBench) -> None:
        first = case.submit()
        case.execute()
        second = case.submit()
        assert (data_of(first), data_of(second)) == (b"out!", b"out!")
        assert [responses(each)[0].cached for each in (first, second)] == [False, True], "shadows compare no hits"
        assert case.executing == 0
        assert case.submit(b"5678").response_count == 0
        assert case.executing == 1
        case.execute()

    run(scenario)


def test_the_response_has_the_id_of_its_own_request_and_the_parameters_of_the_first() -> None:
    async def scenario(case: CachingBench) -> None:
        case.submit()
        case.execute(parameters={"a": 1})
        sent = case.request()
        sent.id = "second"
        case.kernel.submit(sent)
        [response] = responses(sent)
        assert (response.id, response.model_version, response.parameters) == ("second", "1", {"a": 1})
        assert response.final

    run(scenario)


def test_hits_are_successes_without_an_execution_and_misses_are_counted_when_they_are_stored() -> None:
    async def scenario(case: CachingBench) -> None:
        case.submit()
        assert case.model.statistics.cache_miss.count == 0
        case.execute()
        for _ in range(3):
            case.submit()
        counted = case.model.statistics
        assert (counted.success.count, counted.inference_count, counted.execution_count) == (4, 1, 1)
        assert (counted.cache_hit.count, counted.cache_miss.count) == (3, 1)

    run(scenario)


def test_equal_requests_at_the_same_time_are_all_executed_and_count_one_miss_as_in_triton() -> None:
    async def scenario(case: CachingBench) -> None:
        for _ in range(2):
            case.submit()
        assert case.executing == 2
        case.execute()
        case.execute()
        counted = case.model.statistics
        assert (counted.cache_hit.count, counted.cache_miss.count) == (0, 1)

    run(scenario)


def test_an_error_is_never_stored() -> None:
    async def scenario(case: CachingBench) -> None:
        case.submit()
        case.execute(outputs=None, error=errors.InternalError("no"))
        again = case.submit()
        assert case.executing == 1
        case.execute()
        assert data_of(again) == b"out!"
        assert case.model.statistics.cache_miss.count == 2

    run(scenario)


def test_a_response_without_outputs_and_one_of_several_are_not_stored() -> None:
    async def scenario(case: CachingBench) -> None:
        sent = case.submit()
        sent.respond(Response("m", "1", "", outputs=[], final=False))
        case.execute()
        case.submit()
        case.execute(outputs=None)
        assert case.submit().response_count == 0
        case.execute()

    run(scenario)


def test_requests_that_a_full_queue_refuses_count_nothing() -> None:
    async def scenario(case: CachingBench) -> None:
        sent = case.submit()
        sent.sink.send(Response("m", "1", "", error=errors.QueueFull("")))
        assert case.model.statistics.cache_miss.count == 0
        case.execute()

    run(scenario)


def test_a_loaded_again_model_has_no_entries() -> None:
    async def scenario(case: CachingBench) -> None:
        case.submit()
        case.execute(b"old!")
        case.model.close(errors.ServerStopping(""))
        await case.load()
        again = case.submit()
        case.execute(b"new!")
        assert data_of(again) == b"new!"

    run(scenario)


@pytest.mark.parametrize("more", [{"response_cache": False}, {"decoupled": True}, {"sequence_batching": True}])
def test_other_models_do_not_meet_the_cache(more: dict[str, object]) -> None:
    async def scenario(case: CachingBench) -> None:
        case.model.close(errors.ServerStopping(""))
        await case.load(**more)
        assert "submit" not in vars(case.model), "such a model pays nothing"

    run(scenario)


def test_very_large_requests_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.cache.lookup.MAX_INPUT_BYTE_SIZE", 1000)

    async def scenario(case: CachingBench) -> None:
        for _ in range(2):
            case.submit(bytes(1004))
            case.execute()
        assert case.cache.figures.lookups == 0

    run(scenario)


def test_a_response_is_not_stored_if_a_step_of_the_ensemble_was_loaded_again_meanwhile() -> None:
    async def scenario(case: CachingBench) -> None:
        sent = case.submit()
        assert isinstance(case.model.entrance, CacheAccess)
        case.model.entrance.salt = lambda: b"another"
        case.execute()
        assert data_of(sent) == b"out!"
        assert case.cache.figures.entries == 0
        assert case.model.statistics.cache_miss.count == 1

    run(scenario)


# ---- large inputs ----------------------------------------------------------------------------------


def test_large_inputs_are_hashed_by_a_helper() -> None:
    async def scenario(case: CachingBench) -> None:
        first = case.submit(LARGE)
        assert case.kernel.in_flight == 1
        assert case.executing == 0
        await settled()
        case.execute()
        second, other = case.submit(LARGE), case.submit(LARGE[:-4] + b"else")
        await settled()
        assert (data_of(first), data_of(second)) == (b"out!", b"out!")
        assert case.executing == 1
        case.execute()
        assert responses(other) != []
        assert case.helpers.tasks == 3
        assert case.kernel.in_flight == 0

    run(scenario)


def test_a_helper_that_fails_lets_the_model_execute_the_request() -> None:
    async def scenario(case: CachingBench) -> None:
        case.helpers.error = errors.Unavailable("the helper process was lost")
        sent = case.submit(LARGE)
        await settled()
        case.execute()
        assert data_of(sent) == b"out!"
        assert case.cache.figures.lookups == 0

    run(scenario)


def test_a_request_that_is_cancelled_while_it_is_hashed_ends_at_once() -> None:
    async def scenario(case: CachingBench) -> None:
        case.helpers.gate = asyncio.Event()
        sent = case.submit(LARGE)
        await settled()
        case.kernel.cancel(sent)
        [response] = responses(sent)
        assert isinstance(response.error, errors.RequestCancelled)
        assert case.kernel.in_flight == 0
        assert case.model.statistics.failures["CANCELED"] == 1
        case.helpers.gate.set()
        await settled()
        assert case.executing == 0

    run(scenario)


def test_draining_waits_for_requests_that_are_looked_up() -> None:
    async def scenario(case: CachingBench) -> None:
        case.helpers.gate = asyncio.Event()
        case.submit(LARGE)
        draining = asyncio.create_task(case.kernel.drain())
        await settled()
        assert not draining.done()
        case.helpers.gate.set()
        await settled()
        assert not draining.done()
        case.execute()
        await draining

    run(scenario)


def test_abandoned_requests_at_the_cache_fail() -> None:
    async def scenario(case: CachingBench) -> None:
        case.helpers.gate = asyncio.Event()
        sent = case.submit(LARGE)
        case.kernel.abandon()
        [response] = responses(sent)
        assert isinstance(response.error, errors.Unavailable)
        case.helpers.gate.set()

    run(scenario)


def test_a_helper_that_takes_too_long_lets_the_model_execute_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.cache.lookup.KEY_TIMEOUT_S", 0)

    async def scenario(case: CachingBench) -> None:
        case.helpers.gate = asyncio.Event()
        with ClientRegion(case) as region:
            region.write(b"1234")
            sent = [case.submit(LARGE), case.submit(input_in_region())]
            await until(lambda: case.executing == 2)
            case.helpers.gate.set()
            await settled()
            place = sent[1].inputs[0].span
            assert place is not None
            assert place.lease.region.of_client, "the model has the request as it is: nothing is changed any more"
            for _ in range(2):
                case.execute()
            assert [data_of(each) for each in sent] == [b"out!", b"out!"]
        assert case.cache.figures.lookups == 0

    run(scenario)


# ---- a cache that takes time -------------------------------------------------------------------------


def test_a_request_waits_for_a_slow_cache_and_is_answered_or_executed() -> None:
    cache = SlowCache()

    async def scenario(case: CachingBench) -> None:
        hit, miss = case.submit(), case.submit()
        assert (case.kernel.in_flight, case.executing) == (2, 0)
        cache.asked[0](CachedResponse([Tensor("OUT", "FP32", [1], b"kept")]))
        assert data_of(hit) == b"kept"
        cache.asked[1](None)
        case.execute()
        assert data_of(miss) == b"out!"
        assert len(cache.stored) == 1
        assert case.kernel.in_flight == 0

    run(scenario, CachingBench(cache))


def test_what_comes_for_a_cancelled_request_is_released() -> None:
    cache = SlowCache()

    async def scenario(case: CachingBench) -> None:
        sent = case.submit()
        case.kernel.cancel(sent)
        block = case.helpers.arena.take(4)
        assert block is not None
        cache.asked[0](CachedResponse([Tensor("OUT", "FP32", [1], None, block.span)], leased=True))
        assert case.helpers.arena.allocator.block_count == 0
        assert len(responses(sent)) == 1
        assert case.executing == 0

    run(scenario, CachingBench(cache))


def test_a_miss_of_a_model_without_scheduler_fails() -> None:
    cache = SlowCache()

    async def scenario(case: CachingBench) -> None:
        sent = case.submit()

        case.model.refuse(errors.InternalError("no scheduler runs"))
        cache.asked[0](None)
        [response] = responses(sent)
        assert isinstance(response.error, errors.InternalError)
        assert case.kernel.in_flight == 0

    run(scenario, CachingBench(cache))


# ---- regions of clients --------------------------------------------------------------------------------


class ClientRegion:
    """A region of a client that is registered as `region`."""

    def __init__(self, case: CachingBench, byte_size: int = 4096) -> None:
        self._key = f"/cache-test-{os.getpid()}"
        self._fd = os.open(f"/dev/shm{self._key}", os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._fd, byte_size)
        case.regions.register_system("region", self._key, 0, byte_size)
        self._case = case

    def write(self, data: bytes, offset: int = 0) -> None:
        os.pwrite(self._fd, data, offset)

    def read(self, byte_size: int, offset: int = 0) -> bytes:
        return os.pread(self._fd, byte_size, offset)

    def shorten(self) -> None:
        os.ftruncate(self._fd, 0)

    def __enter__(self) -> ClientRegion:
        return self

    def __exit__(self, *_: object) -> None:
        self._case.regions.unregister(RegionKind.SYSTEM, "region")
        os.close(self._fd)
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm{self._key}")


def input_in_region(byte_size: int = 4) -> Tensor:
    return Tensor("IN", "FP32", [byte_size // 4], None, None, ClientSpan("region", byte_size))


def output_in_region(offset: int = 1024, byte_size: int = 64) -> list[RequestedOutput]:
    return [RequestedOutput("OUT", 0, None, ClientSpan("region", byte_size, offset))]


def test_an_input_in_a_region_has_the_key_of_its_bytes_and_the_model_gets_the_bytes_of_the_key() -> None:
    async def scenario(case: CachingBench) -> None:
        with ClientRegion(case) as region:
            region.write(b"1234")
            sent = case.submit(input_in_region())
            await settled()
            region.write(b"evil")
            [executed] = case.instance.batches[0].requests
            assert bytes(executed.inputs[0].raw()) == b"1234"
            case.execute()
            data_of(sent)
            inline = case.submit(b"1234")
            assert data_of(inline) == b"out!"
            case.submit(b"evil")
            assert case.executing == 1
            case.execute()

    run(scenario)


def test_a_region_that_was_shortened_leaves_the_request_to_the_model() -> None:
    async def scenario(case: CachingBench) -> None:
        with ClientRegion(case) as region:
            case.helpers.gate = asyncio.Event()
            sent = case.submit(input_in_region())
            region.shorten()
            case.helpers.gate.set()
            await settled()
            assert case.executing == 1
            case.execute(outputs=None, error=errors.InvalidArgument("too short"))
            assert len(responses(sent)) == 1

    run(scenario)


def test_a_hit_is_written_to_the_region_that_the_client_names() -> None:
    async def scenario(case: CachingBench) -> None:
        case.submit(b"1234", [RequestedOutput("OUT")])
        case.execute(b"abcd" * 4)
        with ClientRegion(case) as region:
            sent = case.submit(b"1234", output_in_region())
            assert case.kernel.in_flight == 1
            await settled()
            [response] = responses(sent)
            assert response.outputs is not None
            [output] = response.outputs
            assert (output.region_of_client, output.response_bytes()) == (ClientSpan("region", 16, 1024), None)
            assert region.read(16, 1024) == b"abcd" * 4
            response.release()
            assert case.executing == 0

    run(scenario)


def test_an_output_in_a_region_is_stored_before_the_client_can_change_it() -> None:
    async def scenario(case: CachingBench) -> None:
        with ClientRegion(case) as region:
            sent = case.submit(b"1234", output_in_region())
            span = case.instance.batches[0].requests[0].outputs[0].span
            assert span is not None
            region.write(b"wxyz", 1024)
            case.helpers.gate = asyncio.Event()
            case.execute(outputs=[Tensor("OUT", "FP32", [1], None, type(span)(span.lease.share(), span.offset, 4))])
            assert responses(sent) == []
            assert case.kernel.in_flight == 1
            case.helpers.gate.set()
            await settled()
            assert case.kernel.in_flight == 0
            responses(sent)[0].release()
            region.write(b"0000", 1024)
            again = case.submit(b"1234", [RequestedOutput("OUT")])
            assert data_of(again) == b"wxyz"

    run(scenario)


def test_a_response_whose_region_cannot_be_read_is_sent_and_not_stored() -> None:
    async def scenario(case: CachingBench) -> None:
        with ClientRegion(case):
            sent = case.submit(b"1234", output_in_region())
            span = case.instance.batches[0].requests[0].outputs[0].span
            assert span is not None
            case.helpers.error = errors.InvalidArgument("the region was shortened")
            case.execute(outputs=[Tensor("OUT", "FP32", [1], None, type(span)(span.lease.share(), span.offset, 4))])
            await settled()
            assert [response.error for response in responses(sent)] == [None]
            responses(sent)[0].release()
            assert case.cache.figures.entries == 0
            assert case.model.statistics.cache_miss.count == 1

    run(scenario)


def test_a_response_is_not_held_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.cache.lookup.HOLD_TIMEOUT_S", 0)

    async def scenario(case: CachingBench) -> None:
        with ClientRegion(case):
            sent = case.submit(b"1234", output_in_region())
            span = case.instance.batches[0].requests[0].outputs[0].span
            assert span is not None
            case.helpers.gate = asyncio.Event()
            case.execute(outputs=[Tensor("OUT", "FP32", [1], None, type(span)(span.lease.share(), span.offset, 4))])
            await until(lambda: responses(sent) != [])
            responses(sent)[0].release()
            assert case.kernel.in_flight == 0
            case.helpers.gate.set()
            await settled()
            assert len(responses(sent)) == 1
            assert case.cache.figures.entries == 0
            assert case.model.statistics.cache_miss.count == 1

    run(scenario)


def test_a_hit_that_does_not_fit_into_the_region_is_left_to_the_model_and_its_error() -> None:
    async def scenario(case: CachingBench) -> None:
        case.submit(b"1234", [RequestedOutput("OUT")])
        case.execute(b"abcd" * 4)
        with ClientRegion(case):
            case.submit(b"1234", output_in_region(byte_size=8))
            assert case.executing == 1
            case.execute(outputs=None, error=errors.InternalError("should be at least 16 bytes"))

    run(scenario)


def test_a_hit_whose_region_cannot_be_written_fails() -> None:
    async def scenario(case: CachingBench) -> None:
        case.submit(b"1234", [RequestedOutput("OUT")])
        case.execute()
        with ClientRegion(case):
            case.helpers.error = errors.InvalidArgument("the region was shortened")
            sent = case.submit(b"1234", output_in_region())
            await settled()
            [response] = responses(sent)
            assert isinstance(response.error, errors.InvalidArgument)
            assert case.kernel.in_flight == 0
            assert case.model.statistics.fail.count == 1

    run(scenario)


def test_a_request_that_is_cancelled_while_its_hit_is_written_ends_once() -> None:
    async def scenario(case: CachingBench) -> None:
        case.submit(b"1234", [RequestedOutput("OUT")])
        case.execute(bytes(8000))
        with ClientRegion(case, 1 << 16):
            case.helpers.gate = asyncio.Event()
            sent = case.submit(b"1234", output_in_region(byte_size=8000))
            await settled()
            case.kernel.cancel(sent)
            case.helpers.gate.set()
            await settled()
            assert len(responses(sent)) == 1

    run(scenario)


def test_an_output_that_is_named_twice_with_a_region_is_not_looked_up() -> None:
    async def scenario(case: CachingBench) -> None:
        with ClientRegion(case):
            sent = case.request(b"1234", [RequestedOutput("OUT"), *output_in_region()])
            case.placer.lease(sent)
            assert case.model.entrance is not None
            case.model.entrance.submit(sent)  # clients cannot send this: `Kernel.submit` refuses it
            assert case.executing == 1
            case.execute(outputs=None, error=errors.InternalError("no"))
            assert case.cache.figures.lookups == 0

    run(scenario)
