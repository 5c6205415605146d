"""The way of a request from its message to the kernel, with a protocol whose messages are texts.

Queues own the responses in them until they are taken, and release the others; a call has one response.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kernel.errors import InternalError, InvalidArgument, ServerStopping, ServingError, Unavailable
from kernel.serving.prepared import prepare
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import model_spec
from protocols.forwarding import ForwardedHeaders
from protocols.http.inference.tasks import DECODE_INFER, DecodeArguments
from protocols.intake import Decoded, HelperJob, Intake, OnlyResponse, ResponseQueue, take
from shm.tensor import ClientSpan, Tensor
from tests.leased_tensor import leased_tensor
from tests.protocols.front_door_lab import FrontDoorLab, LateHelpers

if TYPE_CHECKING:
    from kernel.serving.prepared import PreparedRequest
    from kernel.serving.route import ModelRoute

#: What a helper decodes.
LARGE = b'{"id":"large","inputs":[{"name":"IN","datatype":"FP32","shape":[2],"data":[1,2]}]}'


class Known(msgspec.Struct):
    common: PreparedRequest


class TextIntake(Intake):
    """A message is the number of elements of the only input, `region` for one in a region, or LARGE."""

    def __init__(self, lab: FrontDoorLab, forwarded: ForwardedHeaders | None = None) -> None:
        super().__init__(lab.kernel, None if forwarded is None else lambda call: forwarded)
        self.known: dict[bytes, PreparedRequest] = {}
        self.decoded = 0

    def match(self, head: None, message: bytes, generation: int, call: TextCall) -> tuple[Request, Known] | None:
        common = self.known.get(message)
        if common is None:
            return None
        return common.with_inputs(inputs(int(message)), "", call), Known(common)

    def decode(self, call: TextCall, message: bytes, received_in: object) -> Decoded | None:
        if message == LARGE:
            return None
        self.decoded += 1
        if message == b"region":
            tensors = [Tensor("IN", "INT8", [9], client_span=ClientSpan("unknown", 4))]
        elif message.isdigit():
            tensors = inputs(int(message))
        else:
            raise InvalidArgument(f"no number: {message.decode()}")
        return Decoded(Request("model", tensors, call), self.kernel.route("model"), "options")

    def keep(self, call: TextCall, message: bytes, decoded: Decoded) -> None:
        assert decoded.route is not None
        self.known[message] = prepare(decoded.request, decoded.route)

    def helper_job(self, call: TextCall, message: bytes, received_in: object) -> tuple[Request, HelperJob]:
        route = self.kernel.route("model")
        arguments = msgspec.msgpack.encode(DecodeArguments(route.spec, "model", len(message), "identity", 1 << 20, 0))
        source = Tensor("", "UINT8", [len(message)], message)
        return Request("model", [], call), HelperJob(DECODE_INFER, arguments, [source], route)

    def read_options(self, octets: bytes, route: ModelRoute) -> str:
        return "options of the helper"


class TextCall:
    peer, explain = "", False
    take = take

    def __init__(self, intake: TextIntake) -> None:
        self.intake: Any = intake
        self.head: Any = None
        self.request: Request | None = None
        self.decoded: Any = None
        self.decoding: Any = None
        self.request_id = ""
        self.deadline_ns = 0
        self.error: Exception | None = None
        self.responses: list[Response] = []
        self.after_helper = 0

    def refused(self, error: Exception) -> None:
        self.error = error

    def decoded_by_helper(self) -> None:
        self.after_helper += 1

    def header(self, name: str) -> str:
        return ""

    def send(self, response: Response) -> None:
        self.responses.append(response)


def inputs(count: int) -> list[Tensor]:
    return [Tensor("IN", "FP32", [count], bytes(4 * count))]


@pytest.fixture
def lab() -> FrontDoorLab:
    made = FrontDoorLab()
    made.executed = []  # type: ignore[attr-defined]
    made.add_model(model_spec(dims=(2,)), made.executed.append)  # type: ignore[attr-defined]
    return made


def executed(lab: FrontDoorLab) -> list[Request]:
    return lab.executed  # type: ignore[attr-defined, no-any-return]


def taken(intake: TextIntake, message: bytes) -> TextCall:
    call = TextCall(intake)
    call.take(message)
    return call


def refusal(call: TextCall) -> ServingError:
    [response] = call.responses
    assert response.refused
    assert response.error is not None
    return response.error


def test_a_message_that_was_seen_is_not_decoded_again(lab: FrontDoorLab) -> None:
    intake = TextIntake(lab)
    calls = [taken(intake, b"2") for _ in range(3)]
    assert intake.decoded == 1
    assert [request.sink for request in executed(lab)] == calls
    assert calls[0].decoded == "options"
    assert isinstance(calls[1].decoded, Known)


def test_what_cannot_be_decoded_is_refused_by_the_call(lab: FrontDoorLab) -> None:
    call = taken(TextIntake(lab), b"x")
    assert str(call.error) == "no number: x"
    assert (call.responses, executed(lab)) == ([], [])


def test_a_request_that_does_not_fit_its_model_is_refused_by_the_kernel_and_not_remembered(lab: FrontDoorLab) -> None:
    intake = TextIntake(lab)
    assert "unexpected shape" in refusal(taken(intake, b"3")).message
    assert intake.known == {}


def test_an_unknown_region_is_reported_before_what_else_is_wrong(lab: FrontDoorLab) -> None:
    assert "Unable to find shared memory region: 'unknown'" in refusal(taken(TextIntake(lab), b"region")).message


def test_forwarded_headers_are_parameters_of_each_request_and_of_no_prepared_one(lab: FrontDoorLab) -> None:
    intake = TextIntake(lab, ForwardedHeaders({"key": "first"}))
    taken(intake, b"2")
    intake.forwarded = lambda call: ForwardedHeaders({"other": "second"})
    taken(intake, b"2")
    assert [request.parameters for request in executed(lab)] == [{"key": "first"}, {"other": "second"}]


def test_an_intake_that_has_stopped_refuses_every_message(lab: FrontDoorLab) -> None:
    intake = TextIntake(lab)
    intake.refusal = Unavailable("the door is closed")
    assert taken(intake, b"2").error is intake.refusal


def test_a_helper_decodes_what_takes_too_long(lab: FrontDoorLab) -> None:
    helpers = lab.kernel.helpers = LateHelpers()
    call = taken(TextIntake(lab, ForwardedHeaders({"key": "value"})), LARGE)
    assert call.decoding is not None
    assert executed(lab) == []
    helpers.run_all()
    [request] = executed(lab)
    assert (call.decoding, call.decoded, call.request_id) == (None, "options of the helper", "large")
    assert (request.sink, request.parameters, call.after_helper) == (call, {"key": "value"}, 1)


def test_a_request_that_a_helper_has_decoded_keeps_the_deadline_of_its_call(lab: FrontDoorLab) -> None:
    helpers = lab.kernel.helpers = LateHelpers()
    call = TextCall(TextIntake(lab))
    call.deadline_ns = 1 << 62
    call.take(LARGE)
    helpers.run_all()
    assert [request.deadline_ns for request in executed(lab)] == [1 << 62]


def test_a_request_that_only_a_forwarded_header_makes_wrong_leaves_no_memory_in_use(lab: FrontDoorLab) -> None:
    helpers = lab.kernel.helpers = LateHelpers()
    call = taken(TextIntake(lab, ForwardedHeaders({}, "timeout")), LARGE)
    helpers.run_all()
    assert "Header 'timeout' is reserved" in str(call.error)
    arena = lab.kernel.resolve("model").input_arena
    assert arena is not None
    assert arena.allocator.block_count == 0
    assert (executed(lab), lab.kernel.in_flight) == ([], 0)


def test_while_the_server_stops_no_helper_is_asked(lab: FrontDoorLab) -> None:
    lab.kernel.stopping = True
    call = taken(TextIntake(lab), LARGE)
    assert isinstance(call.error, ServerStopping)
    assert call.decoding is None


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
