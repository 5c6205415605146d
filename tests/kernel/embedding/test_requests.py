"""Requests of an embedding program and their responses; in these tests the loop runs in the program's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel.embedding.requests import EmbeddedCall, Outputs, ResponseStream, make_call, read_options
from kernel.errors import InternalError, InvalidArgument, ModelNotFound, ServingError, Unavailable
from kernel.serving.response import Response
from kernel.testing import model_spec
from shm.tensor import Tensor
from tests.leased_tensor import leased_tensor
from tests.protocols.front_door_lab import FrontDoorLab

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.kernel import Kernel
    from kernel.serving.request import Request


class ImmediateLoop:
    """A `ServerLoop` that runs callbacks immediately, in the caller's thread."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.ended = False

    def post(self, callback: Callable[[], object]) -> None:
        if self.ended:
            raise Unavailable("the server is not running")
        callback()


class Program:
    """A program that embeds a server with one model, which executes requests with the function `respond`."""

    def __init__(self, respond: Callable[[Request], None], *, decoupled: bool = False) -> None:
        self.lab = FrontDoorLab()
        self.spec = model_spec("m", dims=(-1,), decoupled=decoupled)
        #: The requests that have reached the model.
        self.requests: list[Request] = []
        self.server = ImmediateLoop(self.lab.kernel)

        def execute(request: Request) -> None:
            self.requests.append(request)
            respond(request)

        self.instance = self.lab.add_model(self.spec, execute)

    def call(self, name: str = "m", *, streaming: bool = False, **options: Any) -> EmbeddedCall:
        made = make_call(self.server, self.spec, name, {"IN": [1, 2]}, options, streaming=streaming)  # type: ignore[arg-type]  # options of tests may be wrong
        made.begin()
        return made

    def stream(self, **options: Any) -> ResponseStream:
        return ResponseStream(self.call(streaming=True, **options))


def response(
    request: Request, value: float = 0, *, final: bool = True, on_release: Callable[[], None] | None = None
) -> Response:
    data = np.full(2, value, np.float32).tobytes()
    if on_release is None:
        output = Tensor("OUT", "FP32", [2], data)
    else:
        output = leased_tensor("OUT", "FP32", [2], data, on_release)
    return Response("m", "1", request.id, [output], {"seen": True}, None, final, on_release is not None)


def end(request: Request) -> Response:
    return Response("m", "1", request.id)


def never(request: Request) -> None:
    """Do not respond."""


def test_a_response_has_outputs_by_name_and_parameters() -> None:
    program = Program(lambda request: request.respond(response(request, 3)))
    outputs = program.call(request_id="7").only_outputs()
    assert isinstance(outputs, Outputs)
    assert {name: array.tolist() for name, array in outputs.items()} == {"OUT": [3, 3]}
    assert (outputs.model_name, outputs.model_version, outputs.request_id) == ("m", "1", "7")
    assert outputs.parameters == {"seen": True}


def test_options_reach_the_model() -> None:
    program = Program(lambda request: request.respond(response(request)))
    program.call(
        model_version=1,
        outputs={"OUT": 3},
        request_id="a",
        parameters={"k": 1.5},
        correlation_id="sequence",
        sequence_start=True,
        sequence_end=True,
        priority=2,
        timeout_us=3,
    )
    request = program.requests[0]
    assert (request.model_version, request.id, request.parameters) == ("1", "a", {"k": 1.5})
    assert [(output.name, output.classification) for output in request.outputs] == [("OUT", 3)]
    assert (request.correlation_id, request.sequence_start, request.sequence_end) == ("sequence", True, True)
    assert (request.priority, request.timeout_us) == (2, 3)
    assert request.inputs[0].data == np.array([1, 2], np.float32).tobytes()


def test_outputs_can_be_requested_by_name() -> None:
    program = Program(lambda request: request.respond(response(request)))
    program.call(outputs=("OUT",))
    assert [(output.name, output.classification) for output in program.requests[0].outputs] == [("OUT", 0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "high"}, "invalid option of a request: Expected `int`, got `str` - at `$.priority`"),
        ({"outputs": "OUT"}, "invalid option of a request: Expected `object | array`, got `str` - at `$.outputs`"),
        ({"parameters": {"k": b""}}, "invalid option of a request: Expected `"),
        ({"request_id": "\ud800"}, "invalid option of a request: 'utf-8' codec can't encode"),
        ({"priority": -1}, "priority must be an unsigned integer of 64 bits, got -1"),
        ({"correlation_id": -1}, "correlation_id must be an unsigned integer of 64 bits, got -1"),
        ({"timeout_us": 2**64}, "timeout_us must be an unsigned integer of 64 bits, got 18446744073709551616"),
        ({"parameters": {"k": 2**63}}, "parameter 'k' must be an integer of 64 bits, got 9223372036854775808"),
        ({"parameters": {"triton_x": 1}}, "parameter keys starting with 'triton_' are reserved for Triton usage"),
    ],
)
def test_options_that_do_not_fit_into_a_message_are_refused(options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_options(options)
    assert caught.value.message.startswith(message)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a request has no option 'sequence_id', only model_version, outputs,"):
        read_options({"sequence_id": 1})  # type: ignore[typeddict-unknown-key]


def test_the_error_of_a_refused_request_is_raised_while_waiting_for_the_response() -> None:
    program = Program(never)
    with pytest.raises(ModelNotFound, match="Request for unknown model: 'x' is not found"):
        program.call("x").only_outputs()
    with pytest.raises(InvalidArgument, match="unexpected inference output 'X' for model 'm'"):
        program.call(outputs=["X"]).only_outputs()


def test_a_decoupled_model_is_for_streams_only() -> None:
    program = Program(never, decoupled=True)
    with pytest.raises(ServingError, match=r"^infer\(\), unlike stream\(\), doesn't support models with decoupled"):
        program.call().only_outputs()
    assert program.requests == []


def test_exactly_one_response_is_expected() -> None:
    def two(request: Request) -> None:
        request.respond(response(request, final=False))
        request.respond(response(request))

    with pytest.raises(InternalError, match="^expected a single response, got 2$"):
        Program(two).call().only_outputs()
    with pytest.raises(InternalError, match="^expected a single response, got 0$"):
        Program(lambda request: request.respond(end(request))).call().only_outputs()


def test_a_final_response_without_outputs_may_follow_the_outputs() -> None:
    def then_end(request: Request) -> None:
        request.respond(response(request, 1, final=False))
        request.respond(end(request))

    assert Program(then_end).call().only_outputs()["OUT"].tolist() == [1, 1]


def test_memory_is_released_when_the_response_has_been_read() -> None:
    released: list[str] = []
    program = Program(lambda request: request.respond(response(request, 5, on_release=lambda: released.append("once"))))
    call = program.call()
    assert released == []
    assert call.only_outputs()["OUT"].tolist() == [5, 5]
    assert released == ["once"]


def test_taking_a_response_from_a_stream_gives_credit_to_the_model() -> None:
    program = Program(never, decoupled=True)
    stream = program.stream()
    request = program.requests[0]
    for value in range(3):
        request.respond(response(request, value, final=False))
    assert next(stream)["OUT"].tolist() == [0, 0]
    assert program.instance.credit == {request: 1}
    request.respond(end(request))
    assert [outputs["OUT"].tolist() for outputs in stream] == [[1, 1], [2, 2]]
    assert list(stream) == []
    assert program.instance.cancelled == []


def test_a_stream_continues_after_a_response_with_an_error() -> None:
    program = Program(never, decoupled=True)
    stream = program.stream()
    request = program.requests[0]
    request.respond(Response("m", "1", "", error=InvalidArgument("not this one"), final=False))
    request.respond(response(request, 1))
    with pytest.raises(InvalidArgument, match="not this one"):
        next(stream)
    assert next(stream)["OUT"].tolist() == [1, 1]
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("leave", ["close", "with", "forget"])
def test_closing_or_dropping_a_stream_cancels_its_request(leave: str) -> None:
    program = Program(never, decoupled=True)
    released: list[str] = []
    stream: ResponseStream | None = program.stream()
    assert stream is not None
    request = program.requests[0]
    request.respond(response(request, 1, final=False, on_release=lambda: released.append("once")))
    if leave == "with":
        with stream:
            pass
    elif leave == "close":
        stream.close()
        assert list(stream) == []
    stream = None
    assert program.instance.cancelled == [request]
    assert released == ["once"]


def test_a_client_timeout_raises_and_cancels_the_request() -> None:
    program = Program(never)
    call = program.call(client_timeout=0)
    with pytest.raises(TimeoutError, match="^model 'm' did not respond within 0 s$"):
        call.only_outputs()
    call.abandon()
    assert program.instance.cancelled == program.requests
    stream = program.stream(client_timeout=0)
    with pytest.raises(TimeoutError):
        next(stream)
    assert program.instance.cancelled == program.requests


def test_a_server_that_has_ended_refuses_requests() -> None:
    program = Program(never, decoupled=True)
    stream = program.stream()
    program.server.ended = True
    stream.close()
    with pytest.raises(Unavailable, match="the server is not running"):
        program.call()
