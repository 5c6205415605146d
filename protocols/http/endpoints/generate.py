"""POST …/generate and …/generate_stream: one flat JSON object in, one or a stream of them out."""

from __future__ import annotations

import contextlib
from time import monotonic_ns
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument, ServingError
from protocols.http import web
from protocols.http.bodies import BodyCollector, read_body_into, send, write
from protocols.http.call import REQUEST_ID
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.decoding import OutputFormat
from protocols.http.inference.generate_call import GenerateCall, GenerateHead
from protocols.http.inference.generate_codec import encode_generate
from protocols.http.inference.infer_call import response_cost_us
from protocols.http.inference.tasks import ENCODE_GENERATE, encode_arguments
from protocols.http.json.tensor import NeedsCare
from protocols.http.responses import JSON, SERVER_HEADER, HttpResponse, error_body, retry_headers
from protocols.large_requests import LOOP_BYTE_SIZE, AwaitedTask, tensor_with_own_lease
from protocols.status import http_status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kernel.serving.response import Response
    from protocols.http.call import HttpCall
    from shm.tensor import Buffer, Tensor

_ALL_JSON = OutputFormat()

_NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)


class _Encoded(msgspec.Struct):
    """A response, encoded."""

    status: int
    #: JSON, in the memory of `source` if there is one.
    body: Buffer
    source: Tensor | None = None
    #: Headers of a response that is an error.
    headers: dict[str, str] = {}

    def release(self) -> None:
        if self.source is not None:
            self.source.release()


async def generate(call: HttpCall) -> web.StreamResponse:
    """Return the only response. More or fewer responses are an error within a 200 (Triton)."""
    found: list[_Encoded] = []
    try:
        async with contextlib.aclosing(_responses(call)) as stream:
            async for encoded in stream:
                found.append(encoded)
                if len(found) > 1:
                    break
        status = found[0].status if found else 200
        if len(found) != 1:
            return await send(call, HttpResponse(status, JSON, [error_body(_NOT_ONE_RESPONSE)]))
        return await send(call, HttpResponse(status, JSON, [found[0].body], found[0].headers))
    finally:
        for each in found:
            each.release()


async def generate_stream(call: HttpCall) -> web.StreamResponse:
    """Send every response as a server-sent event; the first one decides the HTTP status."""
    response: web.StreamResponse | None = None
    async with contextlib.aclosing(_responses(call)) as stream:
        async for encoded in stream:
            try:
                if response is None:
                    response = await _begin_events(call, encoded.status, encoded.headers)
                if encoded.source is None:
                    await response.write(b"".join((b"data: ", encoded.body, b"\n\n")))
                else:
                    await write(response, [b"data: ", encoded.body, b"\n\n"])
            finally:
                encoded.release()
    return response or await _begin_events(call, 200, {})


async def _begin_events(call: HttpCall, status: int, more: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(
        status=status,
        headers={"Content-Type": "text/event-stream; charset=utf-8", **SERVER_HEADER, **more, **call.response_headers},
    )
    await response.prepare(call.http)
    return response


async def _responses(call: HttpCall) -> AsyncGenerator[_Encoded, None]:
    """Submit the request and yield its responses, encoded. Raises `ServingError` if it is refused.

    The next response is awaited when the one before was sent. Closing the iterator cancels the request.
    """
    if call.http.headers.get("Content-Encoding", IDENTITY) != IDENTITY:
        raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
    name, version = call.names["model"], call.names["version"]
    head = GenerateHead(call.kernel.route(name, version), name, version, call.http.raw_headers)
    generated = GenerateCall(call.door.generation, head, lambda: call.peer)
    if call.kernel.takes_times:
        generated.begin_ns = monotonic_ns()
    try:
        await _submit(call, generated)
        final = False
        while not final:
            response = await generated.next()
            final = response.final
            try:
                if response.empty:
                    continue
                if response.error is not None:
                    raise response.error
                encoded = await _encode(call, response)
            except ServingError as error:
                encoded = _Encoded(http_status(error), error_body(error.text), None, retry_headers(error))
            finally:
                response.release()
            yield encoded
    finally:
        generated.close()


async def _submit(call: HttpCall, generated: GenerateCall) -> None:
    """Receive, decode and submit the request. Raises `ServingError` if it is refused before it is submitted."""
    with BodyCollector(call.kernel.memory_for_helper, call.http.content_length) as collector:
        try:
            await read_body_into(call.http, call.max_input_size, call.json_too_large, collector.add)
            if collector.byte_size > LOOP_BYTE_SIZE:
                await generated.take_sources(collector.sources())
            else:
                generated.take(collector.body())
            if generated.error is not None:
                raise generated.error
        finally:
            call.http[REQUEST_ID] = generated.request_id


async def _encode(call: HttpCall, response: Response) -> _Encoded:
    """Encode a response. Raises `ServingError`."""
    cost_us = response_cost_us(response, _ALL_JSON, IDENTITY)
    if call.door.inference.takes(cost_us):
        with contextlib.suppress(NeedsCare):
            return _Encoded(200, encode_generate(response, plain_only=cost_us > 0))
    arguments, sources = encode_arguments(response, _ALL_JSON, IDENTITY)
    # The sources have the leases of the response, which its holder releases: the task needs some of its own.
    shared = [tensor_with_own_lease(source) for source in sources]
    _, output = await AwaitedTask(call.kernel, ENCODE_GENERATE, arguments, shared, peer=call.peer).run()
    assert output is not None, "an encoded response has bytes"
    return _Encoded(200, output.raw(), output)
