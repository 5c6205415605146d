"""Parts of a stream call that need no connection."""

from __future__ import annotations

from typing import Any

from kernel.serving.request import Request
from kernel.serving.response import Response
from protocols.grpc.rpcs.stream_messages import StreamRequestSink


class RecordingCall:
    """What a sink needs of its call."""

    def __init__(self) -> None:
        self.responses: list[tuple[Request, Response]] = []

    def put(self, request: Request, response: Response) -> None:
        self.responses.append((request, response))


def test_a_request_with_its_final_response_leaves_nothing_for_the_garbage_collector() -> None:
    call: Any = RecordingCall()
    sink = StreamRequestSink(call)
    request = sink.request = Request("m", [], sink)
    first, last = (Response("m", "1", "", final=final) for final in (False, True))
    sink.send(first)
    assert sink.request is request
    sink.send(last)
    assert sink.request is None
    assert call.responses == [(request, first), (request, last)]
