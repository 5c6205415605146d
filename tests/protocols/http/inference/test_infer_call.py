"""What decides about an inference request over HTTP: decoding, submitting, errors and their content types, encoding."""

from __future__ import annotations

import gzip
import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InternalError, InvalidArgument, QueueFull, Unavailable
from kernel.serving.response import Response
from protocols.forwarding import ForwardedHeaders
from protocols.http.inference import infer_call as call_module
from protocols.http.inference.compression import GZIP, IDENTITY
from protocols.http.inference.infer_call import HEADER_LENGTH, HttpInferCall, HttpInference
from protocols.http.inference.prepared import InferRequestHead
from protocols.http.responses import HttpResponse
from tests.leased_tensor import leased_tensor
from tests.own_records import own_records
from tests.protocols.front_door_lab import LateHelpers
from tests.protocols.http.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.kernel import Kernel
    from kernel.serving.request import Request

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]

JSON, PLAIN, BINARY = "application/json", "text/plain", "application/octet-stream"


class RecordedCall(HttpInferCall):
    """Keeps the response, with a copy of its body."""

    response: HttpResponse | None = None

    def finish(self, response: HttpResponse) -> None:
        assert self.response is None, "a second response"
        self.response = HttpResponse(
            response.status, response.content_type, [bytes(part) for part in response.body], response.headers
        )
        if response.source is not None:
            response.source.release()
        self._left()


def body(data: bytes = struct.pack("<2f", 1, 2), **more: Any) -> tuple[int, bytes]:
    """Return a body with one input of binary data, behind the length of its JSON."""
    parameters = {"binary_data_size": len(data)}
    tensor = {"name": "IN", "datatype": "FP32", "shape": [len(data) // 4], "parameters": parameters}
    text = json.dumps({**more, "inputs": [tensor]}).encode()
    return len(text), text + data


def begin(
    kernel: Kernel,
    given: tuple[int, bytes],
    *,
    model: str = "echo",
    encoding: str = IDENTITY,
    forwarded: ForwardedHeaders | None = None,
    inference: HttpInference | None = None,
) -> RecordedCall:
    """Return a call that was started with a body behind the length of its JSON."""
    header_length, octets = given
    head = InferRequestHead(
        kernel.route(model), model, "", f"/{model}", len(octets), header_length, encoding, forwarded
    )
    call = RecordedCall(inference or HttpInference(kernel, 1 << 20), head, Waiter())
    call.start(octets)
    return call


def received(call: RecordedCall) -> tuple[int, str, Any]:
    """Return status, content type and JSON of the response."""
    assert call.response is not None
    text = b"".join(call.response.body)
    length = call.response.headers.get(HEADER_LENGTH)
    return call.response.status, call.response.content_type, json.loads(text[: int(length)] if length else text)


def submitted(kernel: Kernel, model: str = "stuck") -> list[Request]:
    """Return a list that gets the requests that `model` is given."""
    found: list[Request] = []
    submit = kernel.resolve(model).submit

    def note(request: Request) -> None:
        found.append(request)
        submit(request)

    kernel.resolve(model).submit = note  # type: ignore[method-assign]
    return found


def test_a_response_is_json_or_json_with_tensors_behind_it(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        call = begin(kernel, body(id="7"))
        status, content_type, document = received(call)
        assert (status, content_type, document["outputs"][0]["data"]) == (200, JSON, [1, 2])
        assert (call.request_id, document["id"]) == ("7", "7")
        call = begin(kernel, body(parameters={"binary_data_output": True}))
        status, content_type, document = received(call)
        assert (status, content_type) == (200, BINARY)
        assert call.response is not None
        assert call.response.body[1:] == [struct.pack("<2f", 1, 2)]

    with_kernel(test)


def test_a_raw_request_has_no_json(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        call = begin(kernel, (0, bytes(8)), model="batched")
        assert received(call)[:2] == (200, BINARY)

    with_kernel(test)


# ---- errors, and whether they are plain text ---------------------------------------------------


@pytest.mark.parametrize(
    ("given", "status", "text"),
    [
        ((3, b'{"x'), 500, "failed to parse the request JSON buffer"),
        (body(bytes(7)), 400, "input byte size mismatch"),
        ((0, bytes(7)), 400, "input byte size mismatch for input 'raw_input'"),
        (body(outputs=[{"name": "NO"}]), 400, "unexpected inference output 'NO'"),
    ],
)
def test_what_is_refused_before_it_is_queued_is_json(
    with_kernel: WithKernel, given: tuple[int, bytes], status: int, text: str
) -> None:
    async def test(kernel: Kernel) -> None:
        call = begin(kernel, given)
        found_status, content_type, document = received(call)
        assert (found_status, content_type) == (status, JSON)
        assert text in document["error"]

    with_kernel(test)


@pytest.mark.parametrize(
    ("error", "status", "content_type"),
    [
        (InvalidArgument("the model says no"), 400, PLAIN),
        (InvalidArgument("[request id: 7] the model says no"), 400, PLAIN),
        (Unavailable("gone"), 503, PLAIN),
        (QueueFull("7"), 503, JSON),
    ],
)
def test_an_error_of_a_queued_request_is_plain_text_unless_it_comes_from_before_the_queue(
    with_kernel: WithKernel, error: Any, status: int, content_type: str
) -> None:
    async def test(kernel: Kernel) -> None:
        requests = submitted(kernel)
        call = begin(kernel, body(id="7"), model="stuck")
        assert call.response is None
        requests[0].fail(error)
        assert received(call) == (status, content_type, {"error": error.message})

    with_kernel(test)


def test_an_output_that_json_cannot_carry_is_plain_text_and_is_released(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        requests, released = submitted(kernel), []
        call = begin(kernel, body(), model="stuck")
        output = leased_tensor("OUT_IN", "FP16", [1], bytes(2), lambda: released.append(1))
        requests[0].respond(Response("stuck", "1", "", outputs=[output], leased=True))
        status, content_type, document = received(call)
        assert (status, content_type) == (400, PLAIN)
        assert "sending FP16 data via JSON is not supported" in document["error"]
        assert released == [1]

    with_kernel(test)


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_responses_than_one_is_an_error(with_kernel: WithKernel, count: int) -> None:
    async def test(kernel: Kernel) -> None:
        requests, released = submitted(kernel), []
        call = begin(kernel, body(), model="stuck")
        for _ in range(count):
            output = leased_tensor("OUT_IN", "FP32", [1], bytes(4), lambda: released.append(1))
            requests[0].respond(Response("stuck", "1", "", outputs=[output], final=False, leased=True))
        requests[0].respond(Response("stuck", "1", ""))
        error = {"error": f"expected a single response, got {count}"}
        assert received(call) == (500, JSON, error)
        assert len(released) == count

    with_kernel(test)


@pytest.mark.parametrize("place", ["decode_body", "encode_infer"])
def test_an_exception_is_logged_and_the_client_gets_its_number(
    with_kernel: WithKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    def broken(*given: object) -> None:
        raise ZeroDivisionError("the secret of the server")

    async def test(kernel: Kernel) -> None:
        monkeypatch.setattr(call_module, place, broken)
        status, content_type, document = received(begin(kernel, body()))
        monkeypatch.undo()
        assert (status, content_type) == (500, JSON)
        assert document["error"].startswith("internal error (see ")
        assert "secret" not in document["error"]

    with_kernel(test)
    (record,) = own_records(caplog)
    assert record.getMessage().endswith(" in POST /echo")
    assert record.exc_info is not None


# ---- forwarded headers --------------------------------------------------------------------------


def test_forwarded_headers_are_parameters_of_their_own_request_only(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        inference = HttpInference(kernel, 1 << 20)
        given = body(parameters={"n": 5, "X": "body"})
        for user in ("ann", "bob", None):
            forwarded = ForwardedHeaders({"X": user}) if user else None
            _, _, document = received(begin(kernel, given, forwarded=forwarded, inference=inference))
            assert document["parameters"] == {"n": 5, "X": user or "body"}

    with_kernel(test)


def test_a_reserved_header_is_refused_when_the_body_was_decoded(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        inference, reserved = HttpInference(kernel, 1 << 20), ForwardedHeaders({}, "Timeout")
        _, _, document = received(begin(kernel, (2, b"{]"), forwarded=reserved, inference=inference))
        assert "failed to parse" in document["error"]
        error = {"error": "Header 'Timeout' is reserved for Triton usage and cannot be forwarded."}
        assert received(begin(kernel, body(), forwarded=reserved, inference=inference)) == (400, JSON, error)
        assert received(begin(kernel, body(), inference=inference))[0] == 200
        assert received(begin(kernel, body(), forwarded=reserved, inference=inference)) == (400, JSON, error)

    with_kernel(test)


# ---- compressed responses -----------------------------------------------------------------------


def test_a_small_response_is_compressed_at_once(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        call = begin(kernel, body(), encoding=GZIP)
        assert call.response is not None
        assert call.response.headers == {"Content-Encoding": "gzip"}
        assert json.loads(gzip.decompress(b"".join(call.response.body)))["outputs"][0]["data"] == [1, 2]

    with_kernel(test)


def test_a_large_response_is_compressed_by_a_helper(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        helpers = LateHelpers()
        kernel.helpers = helpers
        requests, released = submitted(kernel), []
        call = begin(kernel, body(parameters={"binary_data_output": True}), model="stuck", encoding=GZIP)
        output = leased_tensor("OUT_IN", "FP32", [50_000], bytes(200_000), lambda: released.append(1))
        requests[0].respond(Response("stuck", "1", "", outputs=[output], leased=True))
        assert (released, call.response) == ([], None), "the helper reads the outputs"
        helpers.run_all()
        assert (released, helpers.started) == ([1], ["http.encode_infer"])
        assert call.response is not None
        content = gzip.decompress(b"".join(call.response.body))
        assert content[int(call.response.headers[HEADER_LENGTH]) :] == bytes(200_000)
        assert list(call.response.headers) == [HEADER_LENGTH, "Content-Encoding"]

    with_kernel(test)


def test_a_response_that_a_helper_encodes_is_released_if_its_client_goes(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        helpers = LateHelpers()
        kernel.helpers = helpers
        requests, released = submitted(kernel), []
        call = begin(kernel, body(), model="stuck")
        output = leased_tensor("OUT_IN", "FP32", [50_000], bytes(200_000), lambda: released.append(1))
        requests[0].respond(Response("stuck", "1", "", outputs=[output], leased=True))
        call.cancel()
        assert released == [], "the helper may read the outputs"
        helpers.run_all()
        assert (released, call.response) == ([1], None)

    with_kernel(test)


# ---- clients that go ----------------------------------------------------------------------------


def test_a_cancelled_call_cancels_its_request_and_releases_what_still_comes(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        requests, released = submitted(kernel), []
        call = begin(kernel, body(), model="stuck")
        kernel.cancel = lambda request: released.append("cancelled")
        waiter = call.waiter
        assert isinstance(waiter, Waiter)
        call.cancel()
        output = leased_tensor("OUT_IN", "FP32", [1], bytes(4), lambda: released.append("released"))
        requests[0].respond(Response("stuck", "1", "", outputs=[output], leased=True))
        assert released == ["cancelled", "released"]
        assert (call.response, waiter.ready) == (None, 0)

    with_kernel(test)


def test_a_call_with_its_response_cancels_nothing(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        def cancel(request: Request) -> None:
            raise InternalError("nothing is to be cancelled")

        call = begin(kernel, body())
        kernel.cancel = cancel
        call.cancel()
        assert received(call)[0] == 200

    with_kernel(test)


def test_the_waiter_is_called_once(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        for given in (body(), (2, b"{]")):
            waiter = Waiter()
            model = kernel.route("echo")
            head = InferRequestHead(model, "echo", "", "/", len(given[1]), given[0], IDENTITY)
            RecordedCall(HttpInference(kernel, 1 << 20), head, waiter).start(given[1])
            assert waiter.ready == 1

    with_kernel(test)
