"""POST /v2/models/M/infer: body to request, request to response, response to body."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from aiohttp import web

from kernel.errors import InvalidArgument, request_prefix
from kernel.serving.request import Request
from protocols.http.body import MAX_BODY_BYTE_SIZE, json_too_large, read_body
from protocols.http.call import REQUEST_ID
from protocols.http.codec import OutputForm, decode_infer, encode_infer
from protocols.http.compression import (
    IDENTITY,
    SUPPORTED,
    UnsupportedCompression,
    check_encoding,
    choose_encoding,
    compress,
    decompress,
    inflated_too_large,
)
from protocols.http.raw_input import decode_raw
from protocols.http.responses import JSON, SERVER_HEADER
from protocols.response_sinks import UnarySink

if TYPE_CHECKING:
    from kernel.serving.model import Model
    from kernel.serving.response import Response
    from protocols.http.call import HttpCall

#: What Triton calls this call in errors.
ENTRY_POINT = "HTTP end point"

HEADER_LENGTH = "Inference-Header-Content-Length"

#: Bodies from this size on are inflated and deflated in a thread, so that others do not wait.
THREAD_BYTE_SIZE = 64 << 10

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_NUMBER = re.compile(r"-?[0-9]+", re.ASCII)


async def infer(call: HttpCall) -> web.Response:
    """Execute a request that has exactly one response. Raises `ServingError`."""
    model = call.kernel.resolve_unary(call.names["model"], call.names["version"], ENTRY_POINT)
    announced = _announced_header_length(call)
    body = await _receive(call, announced)
    header_length = _header_length(announced, len(body))
    call.plain_errors = False
    sink = UnarySink()
    request = Request(call.names["model"], [], sink, model_version=call.names["version"], entry_point=ENTRY_POINT)
    form = decode_body(body, header_length, request, model, call.max_input_size)
    call.http[REQUEST_ID] = request.id
    if call.forwarder is not None:
        request.parameters.update(call.forwarder.parameters(call.http.headers.items()))
    # The kernel keeps what it needs: a large body is in its arena as soon as it has accepted the request.
    del body
    response = await _execute(call, request, sink)
    try:
        return await _reply(call, response, form)
    finally:
        response.release()


def decode_body(
    body: bytes | bytearray | memoryview, header_length: int, request: Request, model: Model, max_input_size: int
) -> OutputForm:
    """Fill `request` from a body whose first `header_length` bytes are JSON; 0 stands for a raw request.

    Inputs keep parts of `body`. Raises `ServingError`.
    """
    if header_length:
        view = memoryview(body)
        return decode_infer(bytes(view[:header_length]), view[header_length:], request, max_input_size)
    request.inputs.append(decode_raw(body, model.spec))
    return OutputForm(binary=True)


async def _execute(call: HttpCall, request: Request, sink: UnarySink) -> Response:
    """Return the response of `request`; the caller releases it. Raises the error that it carries."""
    call.kernel.submit(request)
    response = await sink.wait(call.kernel, request)
    if response.error is not None:
        # Triton makes all checks that name the request before it queues it; here some come late.
        call.plain_errors = not response.error.message.startswith(request_prefix(request.id))
        raise response.error
    call.plain_errors = True
    return response


# ---- the body that comes --------------------------------------------------------------------


def _announced_header_length(call: HttpCall) -> int | None:
    """Return the JSON header's length as the client tells it, None where it does not.

    A text without any digit counts as 0, which makes the request a raw one (Triton).
    """
    texts = call.http.headers.getall(HEADER_LENGTH, ())
    if not texts:
        return None
    text = ", ".join(texts)
    if len(texts) == 1 and text and not any(character.isdigit() for character in text):
        return 0
    if len(texts) > 1 or not _NUMBER.fullmatch(text):
        raise InvalidArgument(f"Unable to parse {HEADER_LENGTH}, got: {text}")
    number = int(text) if len(text) <= len(str(_INT32_MIN)) else _INT32_MAX + 1
    if not _INT32_MIN <= number <= _INT32_MAX:
        raise InvalidArgument(
            f"Unable to parse {HEADER_LENGTH}, value is out of range [ {_INT32_MIN}, {_INT32_MAX} ], got: {text}"
        )
    return number


def _header_length(announced: int | None, body_byte_size: int) -> int:
    """Return how much of the body is JSON; 0 stands for a raw request, which an empty body is too."""
    if announced is None:
        return body_byte_size
    if not 0 <= announced <= body_byte_size:
        raise InvalidArgument(f"inference header size should be in range (0, {body_byte_size}), got: {announced}")
    return announced


async def _receive(call: HttpCall, announced: int | None) -> bytes:
    """Return the body, inflated. Raises `ServingError` for one that is too large or broken."""
    limit = call.max_input_size
    try:
        encoding = check_encoding(call.http.headers.get("Content-Encoding"))
    except UnsupportedCompression:
        call.error_headers["Accept-Encoding"] = SUPPORTED
        raise
    if encoding != IDENTITY:
        body = await read_body(call.http, limit, lambda byte_size: inflated_too_large(limit))
        return await _inflate(body, limit)
    if announced is None:
        return await read_body(call.http, limit, lambda byte_size: json_too_large(call, byte_size))
    if announced == 0:
        return await read_body(call.http, limit, lambda byte_size: _raw_too_large(byte_size, limit))
    if announced > limit:
        # A length that the body cannot have is told as such, whatever the limit.
        _header_length(announced, announced if call.http.content_length is None else call.http.content_length)
        raise json_too_large(call, announced)
    return await read_body(call.http, MAX_BODY_BYTE_SIZE, _body_too_large)


async def _inflate(body: bytes, limit: int) -> bytes:
    if len(body) < THREAD_BYTE_SIZE:
        return decompress(body, limit)
    return await asyncio.to_thread(decompress, body, limit)


def _body_too_large(byte_size: int) -> InvalidArgument:
    return InvalidArgument(
        f"Unable to parse Content-Length, value is out of range [ {_INT32_MIN}, {_INT32_MAX} ], got: {byte_size}"
    )


def _raw_too_large(byte_size: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"Raw input has a byte_size ({byte_size} bytes) that exceeds the maximum allowed value of {limit} "
        "bytes. Use --http-max-input-size to increase the limit."
    )


# ---- the body that goes ---------------------------------------------------------------------


async def _reply(call: HttpCall, response: Response, form: OutputForm) -> web.Response:
    """Return the HTTP response; it does not refer to the outputs of `response` any more."""
    encoded = encode_infer(response, form)
    headers = dict(SERVER_HEADER)
    content_type = JSON
    if encoded.has_binary:
        headers[HEADER_LENGTH] = str(len(encoded.header))
        content_type = "application/octet-stream"
    body = encoded.join()
    offers = call.http.headers.getall("Accept-Encoding", ())
    encoding = choose_encoding(",".join(offers)) if offers else IDENTITY
    if encoding != IDENTITY:
        headers["Content-Encoding"] = encoding
        if len(body) < THREAD_BYTE_SIZE:
            body = compress(body, encoding)
        else:
            body = await asyncio.to_thread(compress, body, encoding)
    return web.Response(body=body, content_type=content_type, headers=headers)
