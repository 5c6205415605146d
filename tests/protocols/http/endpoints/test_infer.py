from __future__ import annotations

import asyncio
import gzip
import io
import json
import struct
import zlib
from typing import TYPE_CHECKING, Any, cast

import pytest

from kernel.serving.response import Response
from protocols.http.endpoints.infer import AiohttpInferCall
from protocols.http.inference.infer_call import HttpInference
from protocols.http.responses import HttpResponse
from tests.leased_tensor import leased_tensor
from tests.protocols.http.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model

    Announce = Callable[[Model], asyncio.Event]
    Exchange = Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]

HEADER_LENGTH = "Inference-Header-Content-Length"
ECHO = "/v2/models/echo/infer"

OUT_OF_RANGE = "inference header size should be in range (0, 2), got: "
NO_NUMBER = "Unable to parse Inference-Header-Content-Length, got: "


def request(*values: float, **more: Any) -> bytes:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [len(values)], "data": values}
    return json.dumps({**more, "inputs": [tensor]}).encode()


def binary_header(byte_size: int, **more: Any) -> bytes:
    parameters = {"binary_data_size": byte_size}
    tensor = {"name": "IN", "datatype": "FP32", "shape": [byte_size // 4], "parameters": parameters}
    return json.dumps({**more, "inputs": [tensor]}).encode()


async def post(
    session: aiohttp.ClientSession, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, str, bytes]:
    # The client warns of large bytes, not of files.
    data = io.BytesIO(body) if isinstance(body, bytes) else body
    async with session.post(path, data=data, headers=headers) as response:
        return response.status, response.headers["Content-Type"], await response.read()


def error_body(text: str) -> bytes:
    return b'{"error":' + json.dumps(text).encode() + b"}"


def test_json_in_json_out(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        assert await post(session, ECHO, request(1, 0.5, id="7")) == (
            200,
            "application/json",
            b'{"id":"7","model_name":"echo","model_version":"1",'
            b'"outputs":[{"name":"OUT_IN","datatype":"FP32","shape":[2],"data":[1.0,0.5]}]}',
        )

    exchange(test)


@pytest.mark.parametrize("byte_size", [64, 1 << 16, 8 << 20])
def test_binary_data_in_and_out_of_any_size(exchange: Exchange, byte_size: int) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        data = struct.pack("<f", 1.5) * (byte_size // 4)
        header = binary_header(byte_size, parameters={"binary_data_output": True})
        sent = io.BytesIO(header + data)
        async with session.post(ECHO, data=sent, headers={HEADER_LENGTH: str(len(header))}) as response:
            body = await response.read()
        length = int(response.headers[HEADER_LENGTH])
        assert response.content_type == "application/octet-stream"
        assert json.loads(body[:length])["outputs"][0]["parameters"] == {"binary_data_size": byte_size}
        assert body[length:] == data

    exchange(test)


def test_a_body_in_chunks_is_joined(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async def parts() -> Any:
            for place in range(0, len(body), 7):
                yield body[place : place + 7]

        body = request(1, 2)
        status, _, received = await post(session, ECHO, parts())
        assert status == 200
        assert json.loads(received)["outputs"][0]["data"] == [1, 2]

    exchange(test)


def test_a_raw_request_has_a_binary_response(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        data = struct.pack("<3f", 1, 2, 3)
        async with session.post("/v2/models/batched/infer", data=data, headers={HEADER_LENGTH: "0"}) as response:
            body = await response.read()
        length = int(response.headers[HEADER_LENGTH])
        assert json.loads(body[:length])["outputs"][0]["shape"] == [1, 3]
        assert body[length:] == data

    exchange(test)


def test_compressed_bodies_both_ways(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        for encoding, packed in (("gzip", gzip.compress(request(4))), ("deflate", zlib.compress(request(4)))):
            headers = {"Content-Encoding": encoding, "Accept-Encoding": f"br, {encoding}"}
            async with session.post(ECHO, data=packed, headers=headers) as response:
                assert response.headers["Content-Encoding"] == encoding
                body = zlib.decompress(await response.read(), 47)
                assert json.loads(body)["outputs"][0]["data"] == [4]
        async with session.post(ECHO, data=b"x", headers={"Content-Encoding": "br"}) as response:
            assert (response.status, response.headers["Accept-Encoding"]) == (501, "gzip, deflate")
            assert await response.read() == error_body("Unsupported compression type")

    exchange(test)


def test_a_large_body_is_inflated_and_deflated(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        header = binary_header(400_000, parameters={"binary_data_output": True})
        packed = gzip.compress(header + bytes(400_000), compresslevel=0)
        headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip", HEADER_LENGTH: str(len(header))}
        async with session.post(ECHO, data=packed, headers=headers) as response:
            body = gzip.decompress(await response.read())
        assert body[int(response.headers[HEADER_LENGTH]) :] == bytes(400_000)

    exchange(test)


@pytest.mark.parametrize(
    ("path", "body", "headers", "expected"),
    [
        ("nothing", request(1), {}, (404, "text/plain", "Request for unknown model: 'nothing' is not found")),
        ("echo/versions/9", b"", {}, (404, "text/plain", "Request for unknown model: 'echo' version 9 is not found")),
        ("unloaded", b"", {}, (404, "text/plain", "Request for unknown model: 'unloaded' has no available versions")),
        (
            "repeat",
            b"not even looked at",
            {},
            (501, "text/plain", "HTTP end point doesn't support models with decoupled transaction policy"),
        ),
        (
            "echo",
            b"{}x",
            {},
            (
                500,
                "application/json",
                "failed to parse the request JSON buffer: The document root must not be followed by other values. at 2",
            ),
        ),
        (
            "pair",
            b"",
            {},
            (
                400,
                "application/json",
                "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got 2 "
                "inputs in 'pair' model configuration",
            ),
        ),
        ("echo", b"{}", {HEADER_LENGTH: "3"}, (400, "text/plain", f"{OUT_OF_RANGE}3")),
        ("echo", b"{}", {HEADER_LENGTH: "-1"}, (400, "text/plain", f"{OUT_OF_RANGE}-1")),
        ("echo", b"{}", {HEADER_LENGTH: "+2"}, (400, "text/plain", f"{NO_NUMBER}+2")),
        ("echo", b"{}", {HEADER_LENGTH: "2abc"}, (400, "text/plain", f"{NO_NUMBER}2abc")),
        ("echo", b"{}", {HEADER_LENGTH: "\u0662"}, (400, "text/plain", f"{NO_NUMBER}\u0662")),
        (
            "echo",
            b"{}",
            {HEADER_LENGTH: "2147483648"},
            (
                400,
                "text/plain",
                "Unable to parse Inference-Header-Content-Length, value is out of range [ -2147483648, 2147483647 ], "
                "got: 2147483648",
            ),
        ),
        ("echo", b"", {"Content-Encoding": "gzip"}, (400, "text/plain", "nothing to be decompressed")),
        (
            "echo",
            gzip.compress(bytes(2_000_000)),
            {"Content-Encoding": "gzip"},
            (
                400,
                "text/plain",
                "Decompressed data size exceeds the maximum allowed value of 1048576 bytes. Use "
                "--http-max-input-size to increase the limit.",
            ),
        ),
        (
            "echo",
            bytes(2_000_000),
            {},
            (
                400,
                "text/plain",
                "request JSON size of 2000000 bytes exceeds the maximum allowed input size of 1048576 bytes. Use "
                "--http-max-input-size to increase the limit.",
            ),
        ),
        (
            "echo",
            bytes(2_000_000),
            {HEADER_LENGTH: "0"},
            (
                400,
                "text/plain",
                "Raw input has a byte_size (2000000 bytes) that exceeds the maximum allowed value of 1048576 bytes. "
                "Use --http-max-input-size to increase the limit.",
            ),
        ),
        (
            "echo",
            bytes(2_000_001),
            {HEADER_LENGTH: "2000000"},
            (
                400,
                "text/plain",
                "request JSON size of 2000000 bytes exceeds the maximum allowed input size of 1048576 bytes. Use "
                "--http-max-input-size to increase the limit.",
            ),
        ),
        (
            "echo",
            json.dumps({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}]}).encode(),
            {},
            (
                400,
                "application/json",
                "[request id: <id_unknown>] inference input 'IN' data-type is 'INT32', but model 'echo' expects 'FP32'",
            ),
        ),
    ],
)  # fmt: skip
def test_refusals_have_tritons_status_content_type_and_text(
    exchange: Exchange, path: str, body: bytes, headers: dict[str, str], expected: tuple[int, str, str]
) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        status, content_type, found = await post(session, f"/v2/models/{path}/infer", body, headers)
        assert (status, content_type, json.loads(found)["error"]) == expected

    exchange(test)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("unknown", 400),
        ("internal", 500),
        ("not_found", 404),
        ("invalid_arg", 400),
        ("unavailable", 503),
        ("unsupported", 501),
        ("already_exists", 400),
        ("cancelled", 400),
    ],
)
def test_errors_of_a_model_have_the_status_of_their_code(exchange: Exchange, code: str, status: int) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [code]}
        received = await post(session, "/v2/models/fail/infer", json.dumps({"inputs": [tensor]}))
        assert received == (status, "text/plain", error_body(f"asked for {code}"))

    exchange(test)


def test_an_output_that_json_cannot_carry_is_an_error(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        tensor = {"name": "IN", "datatype": "FP16", "shape": [0], "parameters": {"binary_data_size": 0}}
        assert await post(session, "/v2/models/half/infer", json.dumps({"inputs": [tensor]})) == (
            400,
            "text/plain",
            error_body("sending FP16 data via JSON is not supported. Please use the binary data format for output"),
        )

    exchange(test)


def test_a_client_that_goes_away_cancels_its_request(exchange: Exchange, announce_submit: Announce) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        model = kernel.resolve("stuck")
        accepted = announce_submit(model)
        call = asyncio.ensure_future(session.post("/v2/models/stuck/infer", data=request(1)))
        await accepted.wait()
        call.cancel()
        await asyncio.wait([call])
        await model.drain()
        assert model.statistics.failures["CANCELED"] == 1

    exchange(test)


def test_a_response_that_comes_as_the_client_goes_is_released(with_kernel: Callable[..., None]) -> None:
    async def test(kernel: Kernel) -> None:
        released: list[bool] = []
        output = leased_tensor("OUT_IN", "FP32", [1], bytes(4), lambda: released.append(True))
        call = AiohttpInferCall(HttpInference(kernel, 1), cast("Any", None), Waiter())
        call.finish(HttpResponse(200, "", [bytes(4)], source=Response("echo", "1", "", outputs=[output], leased=True)))
        assert not released, "it is to be sent"
        call.cancel()
        assert released == [True]

    with_kernel(test)


def test_the_header_length_never_moves_the_end_of_the_request(exchange: Exchange) -> None:
    """With any value of the header, the next request on the connection has its own response."""

    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        url = session._base_url
        assert url is not None
        for length in ("0", "1", "2", "3", "1000000", "-5", "abc", "2, 2"):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(
                f"POST {ECHO} HTTP/1.1\r\nHost: x\r\n{HEADER_LENGTH}: {length}\r\nContent-Length: 2\r\n\r\n{{}}"
                "GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            )
            responses = await reader.read()
            assert responses.count(b"HTTP/1.1 ") == 2, length
            assert responses.rpartition(b"HTTP/1.1 ")[2].startswith(b"200 OK")
            writer.close()

    exchange(test)
