"""POST …/generate and …/generate_stream: one flat JSON object in, one or a stream of them out."""

from __future__ import annotations

import contextlib
import functools
from time import monotonic_ns
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument, ServingError
from kernel.serving.request import Request
from protocols.forwarding import last_value
from protocols.helpers.awaited import AwaitedRequest, AwaitedTask
from protocols.helpers.request_task import LOOP_BYTE_SIZE, tensor_with_own_lease
from protocols.http import web
from protocols.http.bodies.collector import BodyCollector
from protocols.http.bodies.reading import json_too_large, read_body_into
from protocols.http.call import REQUEST_ID
from protocols.http.generate.codec import decode_generate, encode_generate
from protocols.http.generate.tasks import DECODE_GENERATE, ENCODE_GENERATE, DecodeGenerateArguments
from protocols.http.inference.codec import OutputFormat
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.response import HttpResponse
from protocols.http.inference.response_task import response_cost_us
from protocols.http.inference.tasks import encode_arguments
from protocols.http.json.tensor import NeedsCare
from protocols.http.responses import JSON, SERVER_HEADER, error_body, retry_headers
from protocols.http.sending import send, write
from protocols.response_sinks import StreamSink
from protocols.status import http_status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kernel.serving.model import Model
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
    #: JSON. The memory is that of `source`, if there is one.
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
    """Send every response as a server-sent event; the HTTP status is that of the first."""
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
    model = call.kernel.resolve(call.names["model"], call.names["version"])
    stream = StreamSink()
    port = stream.port(functools.partial(last_value, call.http.raw_headers))
    if call.kernel.takes_times:
        port.begin_ns = monotonic_ns()
    request = Request(call.names["model"], [], port, model_version=call.names["version"], streaming=True)
    port.request = request
    try:
        await _submit(call, model, request)
        final = False
        while not final:
            _, response = await stream.next()
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
        if not request.finished:
            call.kernel.cancel(request)
        stream.close()


async def _submit(call: HttpCall, model: Model, request: Request) -> None:
    """Receive, decode and submit the request. Raises `ServingError`."""
    kernel, limit = call.kernel, call.max_input_size
    collector = BodyCollector(kernel.memory_for_helper, call.http.content_length)
    try:
        await read_body_into(call.http, limit, lambda byte_size: json_too_large(call, byte_size), collector.add)
        if collector.byte_size > LOOP_BYTE_SIZE:
            arguments = msgspec.msgpack.encode(DecodeGenerateArguments(model.spec, limit))
            sources = collector.sources()
            task = AwaitedRequest(kernel, model, request, DECODE_GENERATE, arguments, sources, call.peer)
            await task.submit()
        else:
            body, bodies = collector.body(), call.inference.prepared_generate
            prepared = bodies.fill(request, body, kernel.catalog.generation)
            if prepared is not None:
                kernel.submit(request, prepared)
                return
            decode_generate(body, request, model.spec, limit)
            kernel.submit(request, None, None, functools.partial(bodies.add, body))
    finally:
        call.http[REQUEST_ID] = request.id
        collector.release()


async def _encode(call: HttpCall, response: Response) -> _Encoded:
    """Encode a response. Raises `ServingError`."""
    cost_us = response_cost_us(response, _ALL_JSON, IDENTITY)
    if call.inference.takes(cost_us):
        with contextlib.suppress(NeedsCare):
            return _Encoded(200, encode_generate(response, plain_only=cost_us > 0))
    arguments, sources = encode_arguments(response, _ALL_JSON, IDENTITY)
    # The sources have the leases of the response, which its holder releases: the task needs some of its own.
    shared = [tensor_with_own_lease(source) for source in sources]
    _, output = await AwaitedTask(call.kernel, ENCODE_GENERATE, arguments, shared, peer=call.peer).run()
    assert output is not None, "an encoded response has bytes"
    return _Encoded(200, output.raw(), output)
