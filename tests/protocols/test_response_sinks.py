"""Streams own the responses in them until they are taken, and release the others; a call has one response."""

from __future__ import annotations

import asyncio

import pytest

from kernel.errors import InternalError, Unavailable
from kernel.serving.response import Response
from protocols.response_sinks import OnlyResponse, ResponseQueue
from shm.tensor import Tensor
from tests.leased_tensor import leased_tensor


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


def only(*responses: Response) -> Response:
    """Return what is made of `responses`, of which the last ends the request."""
    collected = OnlyResponse()
    assert [collected.add(each) for each in responses] == [each.final for each in responses]
    return collected.take()


def test_the_one_response_is_returned_and_left_to_the_caller() -> None:
    released = Released()
    given = response(released)
    assert only(given) is given
    assert released.count == 0


def test_a_response_may_come_before_the_final_flag() -> None:
    given = response(final=False)
    assert only(given, response(empty=True)) is given


@pytest.mark.parametrize("count", [0, 1, 2])
def test_another_number_of_responses_than_one_is_an_error(count: int) -> None:
    released = Released()
    responses = [response(released, final=False) for _ in range(count)]
    last = response(released) if count else response(empty=True)
    total = count + 1 if count else 0
    with pytest.raises(InternalError, match=f"^expected a single response, got {total}$"):
        only(*responses, last)
    assert released.count == total


def test_an_error_is_a_response_too() -> None:
    error = Unavailable("gone")
    assert only(Response("m", "1", "", error=error)).error is error


def test_a_queue_gives_responses_in_order_and_releases_those_left_at_its_end() -> None:
    async def main() -> None:
        queue = ResponseQueue()
        taken, left, late = Released(), Released(), Released()
        waiting = asyncio.create_task(queue.next())
        await asyncio.sleep(0)
        queue.put(response(taken, final=False))
        queue.put(response(left, final=False))
        (await waiting).release()
        queue.close()
        queue.put(response(late))
        assert (taken.count, left.count, late.count) == (1, 1, 1)

    asyncio.run(main())
