"""Sinks own what they were sent until it is taken, and release what nobody takes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from kernel.errors import InternalError, Unavailable
from kernel.serving.request import Request
from kernel.serving.response import Response
from protocols.response_sinks import StreamSink, UnarySink
from shm.tensor import Tensor
from tests.leased_tensor import leased_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.kernel import Kernel


class FakeKernel:
    """Answers what is submitted with the function that it was made with, if any."""

    def __init__(self, answer: Callable[[Request], None] = lambda _: None) -> None:
        self._answer = answer
        self.cancelled: list[Request] = []

    def submit(self, request: Request) -> None:
        self._answer(request)

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)


async def call(kernel: Kernel, request: Request, sink: UnarySink) -> Response:
    kernel.submit(request)
    return await sink.wait(kernel, request)


class Released:
    """Counts releases."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def response(release: Released | None = None, *, final: bool = True, empty: bool = False) -> Response:
    if empty:
        return Response("m", "1", "", final=final)
    if release is None:
        return Response("m", "1", "", outputs=[Tensor("OUT", "FP32", [0], b"")], final=final)
    output = leased_tensor("OUT", "FP32", [0], b"", release)
    return Response("m", "1", "", outputs=[output], final=final, leased=True)


def ask(*answers: Response) -> Response:
    async def main() -> Response:
        sink = UnarySink()
        request = Request("m", [], sink)

        def answer(asked: Request) -> None:
            for each in answers:
                asked.sink.send(each)

        kernel = FakeKernel(answer)
        return await call(cast("Kernel", kernel), request, sink)

    return asyncio.run(main())


def test_the_one_response_is_returned_and_left_to_the_caller() -> None:
    released = Released()
    assert ask(response(released)).final
    assert released.count == 0


def test_a_response_may_come_before_the_final_flag() -> None:
    assert ask(response(final=False), response(empty=True)).outputs is not None


@pytest.mark.parametrize("count", [0, 2])
def test_any_other_number_of_responses_is_an_error(count: int) -> None:
    released = Released()
    answers = [response(released, final=False) for _ in range(count)]
    with pytest.raises(InternalError, match=f"^expected a single response, got {count}$"):
        ask(*answers, response(empty=True))
    assert released.count == count


def test_an_error_is_a_response_too() -> None:
    error = Unavailable("gone")
    assert ask(Response("m", "1", "", error=error)).error is error


def test_a_caller_that_is_cancelled_cancels_the_request_and_a_late_response_is_released() -> None:
    async def main() -> None:
        kernel, sink = FakeKernel(), UnarySink()
        request = Request("m", [], sink)
        waiting = asyncio.create_task(call(cast("Kernel", kernel), request, sink))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert kernel.cancelled == [request]
        released = Released()
        sink.send(response(released))
        assert released.count == 1

    asyncio.run(main())


def test_a_response_that_comes_together_with_the_cancellation_is_released() -> None:
    async def main() -> None:
        kernel, sink, released = FakeKernel(), UnarySink(), Released()
        waiting = asyncio.create_task(call(cast("Kernel", kernel), Request("m", [], sink), sink))
        await asyncio.sleep(0)
        sink.send(response(released))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert released.count == 1

    asyncio.run(main())


def test_a_stream_gives_responses_in_order_and_releases_those_left_at_its_end() -> None:
    async def main() -> None:
        stream = StreamSink()
        port = stream.port()
        request = port.request = Request("m", [], port)
        taken, left, late = Released(), Released(), Released()
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        port.send(response(taken, final=False))
        port.send(response(left, final=False))
        found, first = await waiting
        assert found is request
        first.release()
        stream.close()
        port.send(response(late))
        assert (taken.count, left.count, late.count) == (1, 1, 1)

    asyncio.run(main())
