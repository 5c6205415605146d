"""What becomes of a response on the fast path: one piece, or pieces that are released when they were written."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from kernel.serving.response import Response
from protocols.http.fast.call import FastCall
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.infer_call import HEADER_LENGTH, HttpInference
from protocols.http.inference.prepared import InferRequestHead
from protocols.http.responses import http_error
from shm.tensor import Tensor
from tests.leased_tensor import leased_tensor
from tests.protocols.http.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

    from kernel.serving.kernel import Kernel

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]


def request_text(byte_size: int, id: str) -> bytes:
    parameters = {"binary_data_size": byte_size}
    tensor = {"name": "IN", "datatype": "FP32", "shape": [byte_size // 4], "parameters": parameters}
    return json.dumps({"id": id, "inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()


def begin(inference: HttpInference, id: str = "") -> FastCall:
    """Return a call of the model `stuck`, which has no response yet."""
    text = request_text(4, id)
    model = inference.kernel.route("stuck")
    head = InferRequestHead(
        model, "stuck", "", "/", len(text) + 4, len(text), IDENTITY, response_headers=b"Vary: Origin\r\n"
    )
    call = FastCall(inference, head, Waiter())
    call.start(text + bytes(4))
    return call


def response(byte_size: int, id: str = "", released: list[str] | None = None) -> Response:
    shape, data = [byte_size // 4], bytes(byte_size)
    if released is None:
        return Response("stuck", "1", id, outputs=[Tensor("OUT_IN", "FP32", shape, data)])
    output = leased_tensor("OUT_IN", "FP32", shape, data, lambda: released.append("released"))
    return Response("stuck", "1", id, outputs=[output], leased=True)


def test_a_small_response_is_one_piece_and_is_released_at_once(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        released: list[str] = []
        call = begin(HttpInference(kernel, 1 << 20))
        call.send(response(4, released=released))
        assert call.response is not None
        assert (call.response.parts, call.response.release, released) == ([], None, ["released"])
        head, _, body = call.response.head.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nVary: Origin\r\n" in head
        assert f"\r\n{HEADER_LENGTH}: {len(body) - 4}\r\n".encode() in head

    with_kernel(test)


def test_a_large_response_refers_to_its_outputs_until_it_was_written(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        released: list[str] = []
        call = begin(HttpInference(kernel, 1 << 20))
        given = response(64 << 10, released=released)
        assert given.outputs is not None
        call.send(given)
        assert call.response is not None
        part = call.response.parts[-1]
        assert isinstance(part, memoryview), "a view of the worker's memory, not a copy"
        assert bytes(part) == bytes(given.outputs[0].raw())
        del part
        assert released == []
        assert call.response.release is not None
        call.response.release()
        assert released == ["released"]

    with_kernel(test)


def test_responses_to_prepared_requests_are_filled_into_a_template(
    with_kernel: WithKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(kernel: Kernel) -> None:
        inference = HttpInference(kernel, 1 << 20)
        encoded: list[bytes] = []
        for number in range(4):
            if number == 2:  # the first request is prepared, the second response is the template
                monkeypatch.setattr("protocols.http.inference.infer_call.encode_infer", None)
            released: list[str] = []
            call = begin(inference, id=str(number))
            call.send(response(4, str(number), released))
            assert call.response is not None
            encoded.append(re.sub(rb"Date: [^\r]*", b"", call.response.head))
            assert encoded[-1] == encoded[0].replace(b'"id":"0"', b'"id":"%d"' % number)
            assert released == ["released"]
        monkeypatch.undo()

    with_kernel(test)


def test_an_error_takes_the_headers_of_every_response_with_it(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        call = begin(HttpInference(kernel, 1 << 20))
        call.finish(http_error(400, "no", plain=True))
        assert call.response is not None
        assert call.response.status == 400
        assert b"\r\nContent-Type: text/plain\r\nVary: Origin\r\n" in call.response.head
        assert call.response.head.endswith(b'{"error":"no"}')

    with_kernel(test)
