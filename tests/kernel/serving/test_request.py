"""A request gets one final response, tells its owner, and gives its leases back when nobody uses the memory."""

from __future__ import annotations

import functools
import gc
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InternalError
from kernel.serving.prepared import prepare
from kernel.serving.request import NO_SINK, Request, WantedInference
from kernel.serving.response import Response
from kernel.testing import RecordingSink
from shm.region import FileHandle, Region, RegionKind
from shm.tensor import RequestedOutput, Span, Tensor
from tests.leased_tensor import leased_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


class RecordingOwner:
    """Notes what it hears of its requests, and whether the sink had the response by then."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def responded(self, request: Request, response: Response) -> None:
        assert isinstance(request.sink, RecordingSink)
        assert response not in request.sink.responses
        self.heard.append(response)

    def consumed(self, request: Request, count: int) -> None:
        self.heard.append(count)

    def cancelled(self, request: Request) -> None:
        self.heard.append("cancelled")


@pytest.fixture
def owner() -> RecordingOwner:
    return RecordingOwner()


@pytest.fixture
def request_(owner: RecordingOwner) -> Request:
    return Request("m", [], RecordingSink(), id="7", model_version="1", owner=owner)


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region("r", RegionKind.SYSTEM, FileHandle(os.memfd_create("r")), 64)
    yield made
    assert made.lease_count == 0
    made.drop()


def responses(request: Request) -> list[Response]:
    assert isinstance(request.sink, RecordingSink)
    return request.sink.responses


def use(request: Request, region: Region) -> None:
    """Let an input and an output of the request lie in `region`."""
    request.inputs = [Tensor("IN", "FP32", [4], span=Span(region.lease(), 0, 16)), Tensor("B", "FP32", [1], bytes(4))]
    request.outputs = [RequestedOutput("OUT", 0, Span(region.lease(), 16, 16)), RequestedOutput("B")]
    request.leased = True


def test_a_response_reaches_the_owner_and_then_the_sink(request_: Request, owner: RecordingOwner) -> None:
    some, last = Response("m", "1", "7", outputs=[], final=False), Response("m", "1", "7", final=True)
    request_.respond(some)
    assert (request_.finished, request_.response_count) == (False, 1)
    request_.respond(last)
    assert (request_.finished, request_.response_count) == (True, 1), "a final flag alone is no response"
    assert owner.heard == responses(request_) == [some, last]


def test_a_response_after_the_final_one_is_a_bug(request_: Request) -> None:
    request_.fail(InternalError("no"))
    with pytest.raises(AssertionError, match="request '7' got a response after its final one"):
        request_.respond(Response("m", "1", "7"))
    assert len(responses(request_)) == 1


def test_an_error_is_the_final_response(request_: Request) -> None:
    error = InternalError("no")
    request_.fail(error)
    [response] = responses(request_)
    assert (response.error, response.final, response.id, response.model_name, response.model_version) == (
        error, True, "7", "m", "1",
    )  # fmt: skip


def test_leases_end_with_the_final_response(request_: Request, region: Region) -> None:
    use(request_, region)
    request_.respond(Response("m", "1", "7", outputs=[], final=False))
    assert region.lease_count == 2
    request_.respond(Response("m", "1", "7"))
    assert region.lease_count == 0


def test_leases_do_not_end_while_a_worker_uses_the_memory(request_: Request, region: Region) -> None:
    use(request_, region)
    request_.in_use = True
    request_.fail(InternalError("Server exiting"))
    assert region.lease_count == 2
    request_.release_leases()
    request_.release_leases()
    assert region.lease_count == 0


def test_the_owner_hears_of_responses_that_were_taken_until_the_final_one(
    request_: Request, owner: RecordingOwner
) -> None:
    request_.consumed()
    request_.consumed(5)
    request_.respond(Response("m", "1", "7"))
    request_.consumed(2)
    assert owner.heard[:2] == [1, 5]
    assert len(owner.heard) == 3


def test_the_owner_hears_once_that_the_client_has_gone(request_: Request, owner: RecordingOwner) -> None:
    request_.cancel()
    request_.cancel()
    assert owner.heard == ["cancelled"]
    assert request_.cancelled
    assert responses(request_) == [], "the final response is still to come"


def test_a_finished_request_is_not_cancelled(request_: Request, owner: RecordingOwner) -> None:
    request_.respond(Response("m", "1", "7"))
    request_.cancel()
    assert not request_.cancelled
    assert "cancelled" not in owner.heard


def test_a_request_that_was_not_submitted_has_no_owner() -> None:
    request = Request("m", [], RecordingSink())
    request.consumed()
    request.cancel()
    request.fail(InternalError("no"))
    assert [type(response.error) for response in responses(request)] == [InternalError]


def test_the_leases_of_a_response_are_released_once() -> None:
    released: list[str] = []
    outputs = [leased_tensor(name, "UINT8", [1], b"x", functools.partial(released.append, name)) for name in "AB"]
    response = Response("m", "1", "7", outputs=[*outputs, Tensor("C", "UINT8", [1], b"x")], leased=True)
    response.release()
    assert released == ["A", "B"]
    assert not response.leased
    response.release()
    assert released == ["A", "B"]


def test_a_response_without_outputs_and_error_is_empty() -> None:
    assert Response("m", "1", "").empty
    assert not Response("m", "1", "", outputs=[]).empty
    assert not Response("m", "1", "", error=InternalError("no")).empty


def test_what_is_wanted_and_what_the_kernel_keeps_are_one_object_of_one_block() -> None:
    sink = RecordingSink()
    route: Any = None  # `prepare` keeps it, and nothing else
    prepared = prepare(Request("m", [Tensor("IN", "FP32", [1], bytes(4))], sink, id="first"), route)
    inputs: list[Tensor] = []
    count = 2000
    kept: list[Request | None] = [None] * count
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for number in range(count):
            kept[number] = prepared.with_inputs(inputs, "x", NO_SINK)
        blocks = (sys.getallocatedblocks() - before) / count
    finally:
        gc.enable()
    assert round(blocks, 1) == 1.0
    assert sys.getsizeof(kept[0]) <= 352


def test_what_is_wanted_is_copied_with_the_request_and_has_nothing_of_the_kernel() -> None:
    request = Request("m", [], NO_SINK, id="x", priority=3)
    request.response_count = 2
    copied = request.copy()
    assert (copied.id, copied.priority, copied.response_count) == ("x", 3, 2)
    wanted = WantedInference("m", [], NO_SINK, id="x")
    assert not {"finished", "owner", "trace", "passage", "in_use", "batch_size"} & set(wanted.__struct_fields__)
