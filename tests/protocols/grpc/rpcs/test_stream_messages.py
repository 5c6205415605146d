"""Parts of a stream call that need no connection."""

from __future__ import annotations

from typing import Any

from kernel.errors import Unavailable
from kernel.serving.request import Request
from kernel.serving.response import Response
from protocols.grpc.rpcs.stream_messages import StreamRequest


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
