"""POST /v2/models/M/infer where aiohttp has the connection: chunked or compressed bodies, HTTP/1.0, `Expect` and so on.

Receives the body, and leaves the rest to `HttpInferCall`, as the fast path does.
"""

from __future__ import annotations

import asyncio
import functools
import re
from time import monotonic_ns
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument
from kernel.records.traced_passage import EXPLAIN_HEADER
from protocols.access import Peer
from protocols.http.bodies import BodyCollector, read_body_into, send
from protocols.http.call import REQUEST_ID
from protocols.http.inference.compression import (
    IDENTITY,
    SUPPORTED,
    UnsupportedCompression,
    check_encoding,
    choose_encoding,
    decompress_small,
    inflated_too_large,
)
from protocols.http.inference.infer_call import ENTRY_POINT, EXPLAINS, HEADER_LENGTH, HttpInferCall
from protocols.http.inference.prepared import InferRequestHead
from protocols.http.inference.tasks import header_length
from protocols.large_requests import LOOP_BYTE_SIZE
from protocols.request_limits import MAX_BODY_BYTE_SIZE

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from protocols.http import web
    from protocols.http.call import HttpCall
    from protocols.http.responses import HttpResponse

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_NUMBER = re.compile(r"-?[0-9]+", re.ASCII)


async def infer(call: HttpCall) -> web.StreamResponse:
    """Execute a request that has exactly one response. Raises `ServingError` until the body is there."""
    http = call.http
    name, version = call.names["model"], call.names["version"]
    begin_ns = monotonic_ns() if call.kernel.takes_times else 0
    route = call.kernel.unary_route(name, version, ENTRY_POINT)
    announced = _announced_header_length(call)
    encoding = _content_encoding(call)
    with BodyCollector(functools.partial(call.kernel.memory_for, route), http.content_length) as collector:
        await _receive(call, announced, encoding, collector)
        body = _small_body(collector, encoding)
        offers = http.headers.getall("Accept-Encoding", ())
        head = InferRequestHead(
            route=route,
            model_name=name,
            model_version=version,
            target=http.raw_path,
            body_byte_size=collector.byte_size,
            header_length=0 if body is None else header_length(announced, len(body)),
            encoding=choose_encoding(",".join(offers)) if offers else IDENTITY,
            forwarded=call.door.rules.forwarded(http.raw_headers),
            headers=http.raw_headers,
            explain=http.headers.get(EXPLAIN_HEADER, "").encode(errors="replace") in EXPLAINS,
        )
        waiter = _FutureWaiter(Peer(http.transport))
        received_ns = monotonic_ns() if begin_ns else 0
        infer_call = AiohttpInferCall(call.door.inference, head, waiter, begin_ns=begin_ns, received_ns=received_ns)
        if body is not None:
            infer_call.start(body)
        else:
            infer_call.start_in_helper(collector.sources(), announced, encoding)
    http[REQUEST_ID] = infer_call.request_id
    # The kernel keeps what it needs: a large body is in its arena as soon as it has accepted the request.
    del body
    try:
        await waiter.done
    except asyncio.CancelledError:
        infer_call.cancel()
        raise
    http[REQUEST_ID] = infer_call.request_id
    assert infer_call.response is not None, "the call has no response"
    return await send(call, infer_call.response)


class AiohttpInferCall(HttpInferCall):
    """A call whose response aiohttp sends."""

    response: HttpResponse | None = None

    def finish(self, response: HttpResponse) -> None:
        self.response = response
        if self.waiter is None and response.source is not None:  # the client has disconnected
            response.source.release()
        self._left()

    def cancel(self) -> None:
        HttpInferCall.cancel(self)
        if self.response is not None and self.response.source is not None:  # it came in the same iteration
            self.response.source.release()


class _FutureWaiter:
    """A `ResponseWaiter` for a coroutine."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def response_ready(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def request_prepared(self) -> None:
        """Nothing waits for the submission: aiohttp begins the next request after the response."""


# ---- the body ------------------------------------------------------------------------------


def _announced_header_length(call: HttpCall) -> int | None:
    """Return the length of the JSON header that the client announces, None if it announces none.

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


def _content_encoding(call: HttpCall) -> str:
    """Return the coding of the body. Raises `UnsupportedCompression`."""
    try:
        return check_encoding(call.http.headers.get("Content-Encoding"))
    except UnsupportedCompression:
        call.error_headers["Accept-Encoding"] = SUPPORTED
        raise


async def _receive(call: HttpCall, announced: int | None, encoding: str, collector: BodyCollector) -> None:
    """Receive the body, as it was sent. Raises `ServingError` for one that is too large or broken."""
    limit = call.max_input_size
    most = limit

    def refuse(byte_size: int) -> ServingError:
        if encoding != IDENTITY:
            return inflated_too_large(limit)
        if announced is None:
            return call.json_too_large(byte_size)
        return _raw_too_large(byte_size, limit) if announced == 0 else _body_too_large(byte_size)

    if encoding == IDENTITY and announced:
        if announced > limit:
            # A length that the body cannot have gets its own error, also above the limit.
            header_length(announced, announced if call.http.content_length is None else call.http.content_length)
            raise call.json_too_large(announced)
        most = MAX_BODY_BYTE_SIZE
    await read_body_into(call.http, most, refuse, collector.add)


def _small_body(collector: BodyCollector, encoding: str) -> bytes | None:
    """Return a body that takes little time to inflate and decode; None for one that a helper decodes."""
    if not collector.is_small:
        return None
    body = collector.body()
    return body if encoding == IDENTITY else decompress_small(body, LOOP_BYTE_SIZE)


def _body_too_large(byte_size: int) -> InvalidArgument:
    return InvalidArgument(
        f"Unable to parse Content-Length, value is out of range [ {_INT32_MIN}, {_INT32_MAX} ], got: {byte_size}"
    )


def _raw_too_large(byte_size: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"Raw input has a byte_size ({byte_size} bytes) that exceeds the maximum allowed value of {limit} "
        "bytes. Use --http-max-input-size to increase the limit."
    )
