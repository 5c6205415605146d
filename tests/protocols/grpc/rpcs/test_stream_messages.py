"""Parts of a stream call that need no connection."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import Unavailable
from kernel.serving.request import Request
from kernel.serving.response import Response
from protocols.grpc.rpcs.stream_messages import RequestOrder, StreamRequest


class RecordingCall:
    """What a request needs of its stream."""

    def __init__(self) -> None:
        self.responses: list[tuple[StreamRequest, Response]] = []

    def put(self, opened: StreamRequest, response: Response) -> None:
        self.responses.append((opened, response))


def test_a_request_with_its_final_response_leaves_nothing_for_the_garbage_collector() -> None:
    call: Any = RecordingCall()
    opened = StreamRequest(call, call)
    request = opened.request = Request("m", [], opened)
    first, last = (Response("m", "1", "", final=final) for final in (False, True))
    request.respond(first)
    opened.forget_ended()
    assert opened.request is request
    request.respond(last)
    opened.forget_ended()
    assert opened.request is None
    assert call.responses == [(opened, first), (opened, last)]


def test_an_error_is_a_refusal_only_while_the_request_is_submitted() -> None:
    for submitting in (True, False):
        call: Any = RecordingCall()
        opened = StreamRequest(call, call, submitting=submitting)
        opened.request = Request("m", [], opened)
        opened.request.fail(Unavailable("full"))
        assert opened.was_refused is submitting


def test_the_oldest_request_is_sent_at_once() -> None:
    order: RequestOrder[str, str] = RequestOrder()
    order.begin("a")
    assert order.put("a", "a1", final=False) == ["a1"]
    assert order.put("a", "a2", final=True) == ["a2"]
    order.check()


def test_responses_to_a_later_request_wait_for_the_older_one() -> None:
    order: RequestOrder[str, str] = RequestOrder()
    order.begin("a")
    order.begin("b")
    order.begin("c")
    assert order.put("c", "c1", final=True) == []
    assert order.put("b", "b1", final=False) == []
    assert order.put("a", "a1", final=True) == ["a1", "b1"]
    order.check()
    assert order.put("b", "b2", final=True) == ["b2", "c1"]
    order.check()


@given(st.data())
def test_responses_are_sent_in_the_order_of_requests_whatever_order_they_were_put_in(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    wanted = [(request, number) for request, count in enumerate(counts) for number in range(count)]
    left = {request: list(range(count)) for request, count in enumerate(counts)}
    order: RequestOrder[int, tuple[int, int]] = RequestOrder()
    for request in left:
        order.begin(request)
    sent: list[tuple[int, int]] = []
    while left:
        request = data.draw(st.sampled_from(sorted(left)))
        number = left[request].pop(0)
        sent += order.put(request, (request, number), final=not left[request])
        order.check()
        if not left[request]:
            del left[request]
    assert sent == wanted
