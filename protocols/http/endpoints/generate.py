"""POST …/generate and …/generate_stream: one flat JSON object in, one or a stream of them out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiohttp import web

from kernel.errors import InvalidArgument, ServingError
from kernel.serving.request import Request
from protocols.http.body import read_json_text
from protocols.http.call import REQUEST_ID
from protocols.http.generate_codec import decode_generate, encode_generate
from protocols.http.inference.compression import IDENTITY
from protocols.http.responses import JSON, SERVER_HEADER, error_body
from protocols.response_sinks import StreamSink
from protocols.status import HTTP_STATUS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from protocols.http.call import HttpCall

_NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)

#: HTTP status and JSON body.
_Encoded = tuple[int, bytes]


async def generate(call: HttpCall) -> web.Response:
    """Return the only response. More or fewer responses are an error within a 200 (Triton)."""
    found: list[_Encoded] = []
    async with contextlib.aclosing(_responses(call)) as stream:
        async for encoded in stream:
            found.append(encoded)
            if len(found) > 1:
                break
    status, body = found[0] if found else (200, b"")
    if len(found) != 1:
        body = error_body(_NOT_ONE_RESPONSE)
    return web.Response(status=status, body=body, content_type=JSON, headers=SERVER_HEADER)


async def generate_stream(call: HttpCall) -> web.StreamResponse:
    """Send every response as a server-sent event; the HTTP status is that of the first."""
    response: web.StreamResponse | None = None
    async with contextlib.aclosing(_responses(call)) as stream:
        async for status, body in stream:
            if response is None:
                response = await _begin_events(call, status)
            await response.write(b"data: " + body + b"\n\n")
    return response or await _begin_events(call, 200)


async def _begin_events(call: HttpCall, status: int) -> web.StreamResponse:
    response = web.StreamResponse(
        status=status,
        headers={"Content-Type": "text/event-stream; charset=utf-8", **SERVER_HEADER, **call.response_headers},
    )
    await response.prepare(call.http)
    return response


async def _responses(call: HttpCall) -> AsyncGenerator[_Encoded, None]:
    """Submit the request and yield its responses, encoded. Raises `ServingError` where it is refused.

    The next response is awaited when the one before was sent. Closing the iterator cancels the request.
    """
    if call.http.headers.get("Content-Encoding", IDENTITY) != IDENTITY:
        raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
    model = call.kernel.resolve(call.names["model"], call.names["version"])
    stream = StreamSink()
    port = stream.port()
    request = Request(call.names["model"], [], port, model_version=call.names["version"], streaming=True)
    port.request = request
    decode_generate(await read_json_text(call), request, model.spec, call.max_input_size)
    call.http[REQUEST_ID] = request.id
    call.kernel.submit(request)
    try:
        final = False
        while not final:
            _, response = await stream.next()
            final = response.final
            try:
                if response.empty:
                    continue
                if response.error is not None:
                    raise response.error
                encoded = 200, encode_generate(response)
            except ServingError as error:
                encoded = HTTP_STATUS[error.code], error_body(error.text)
            finally:
                response.release()
            yield encoded
    finally:
        if not request.finished:
            call.kernel.cancel(request)
        stream.close()
