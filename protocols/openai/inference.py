"""POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings: a stream, one body, or vectors.

The way from the body of a request to requests of the model (`submitted`) is the same for all.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import struct
import uuid
from time import monotonic_ns
from typing import TYPE_CHECKING, NoReturn

import msgspec

from kernel.errors import InternalError, ServingError
from kernel.observe.internal_errors import unexpected_error
from protocols.http import web
from protocols.http.bodies import BodyCollector
from protocols.http.call import REQUEST_ID, identity_of
from protocols.http.responses import JSON, SERVER_HEADER, json_text_response
from protocols.openai.dialects import required_dialect, required_embedding_dialect
from protocols.openai.generation import Generation, GenerationHead
from protocols.openai.pieces import PART_BYTE_SIZE, Piece, long_text, prompt_tokens, read_piece, whole_text
from protocols.openai.plans import Api
from protocols.openai.preparing import prepare
from protocols.openai.responses import Identity, ReadyBody, ReadyEvents, TextBody, TextEvents
from protocols.openai.responses_api import ResponseBody, ResponseEvents

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from kernel.observe.generation_statistics import GenerationStatistics
    from kernel.serving.response import Response
    from kernel.serving.route import ModelRoute
    from protocols.openai.call import OpenAiCall
    from protocols.openai.dialects import Dialect, EmbeddingDialect
    from protocols.openai.generation import Arrived, ChoiceCall
    from protocols.openai.meter import GenerationMeter
    from protocols.openai.plans import GenerationPlan
    from protocols.openai.responses import Receiver
    from shm.tensor import Tensor


#: Before other clients are served, at most this number of responses becomes chunks.
_TAKEN_AT_ONCE = 256

#: Bodies with more bytes are not joined.
_LONG_BODY_BYTE_SIZE = 256 << 10

#: How many bytes of a long body are joined and written at once.
_BLOCK_BYTE_SIZE = 64 << 10

#: A comment, which clients ignore: something has to come, so that the connection is not taken for dead.
_COMMENT = b": waiting for the model\n\n"

_EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
    **SERVER_HEADER,
}


async def chat_completions(call: OpenAiCall) -> web.StreamResponse:
    """Continue a conversation."""
    return await _generate(call, Api.CHAT)


async def completions(call: OpenAiCall) -> web.StreamResponse:
    """Continue a text."""
    return await _generate(call, Api.COMPLETIONS)


async def responses(call: OpenAiCall) -> web.StreamResponse:
    """Continue a conversation, for clients of the Responses API."""
    return await _generate(call, Api.RESPONSES)


#: What ids of responses begin with.
_PREFIXES = {Api.CHAT: "chatcmpl-", Api.COMPLETIONS: "cmpl-", Api.RESPONSES: "resp_"}


async def _generate(call: OpenAiCall, api: Api) -> web.StreamResponse:
    begin_ns = monotonic_ns()
    async with submitted(call, api) as found:
        plan, dialect = found.plan, required_dialect(found.route.spec)
        identity = Identity(_PREFIXES[api] + uuid.uuid4().hex, int(call.door.now_s()), plan.model)
        with call.door.meter(found.route, plan, begin_ns, call.key_use, ready=dialect.ready) as meter:
            requests = _ModelRequests(
                found, dialect, meter, functools.partial(call.door.statistics_of, found.route.spec.name)
            )
            if plan.stream:
                events = (ReadyEvents if dialect.ready else TextEvents)(plan, identity)
                around = ResponseEvents(events, plan, identity) if api is Api.RESPONSES else events
                return await _stream(call, requests, around)
            body = (ReadyBody if dialect.ready else TextBody)(plan, identity)
            return await _whole(call, requests, ResponseBody(body, plan, identity) if api is Api.RESPONSES else body)


class _ModelRequests:
    """How far the requests to the model are."""

    def __init__(
        self,
        found: SubmittedChoices,
        dialect: Dialect,
        meter: GenerationMeter,
        statistics_of: Callable[[str], GenerationStatistics],
    ) -> None:
        """`statistics_of` returns those of a version of the model."""
        self.generation = generation = found.generation
        self._version = found.route.model.version_text
        self._statistics_of = statistics_of
        self._meter = meter
        self._output = dialect.output
        self._model = found.plan.model
        #: How many requests have not ended.
        self.open = len(generation.calls)
        #: How many bytes of texts were taken by this call of `take`.
        self._byte_size = 0
        #: Where the next part begins in the long text of the first response that is left.
        self._place = 0

    def take(self, receiver: Receiver) -> bool:
        """Give `receiver` what has come, a limited part of it; returns whether there is more. Raises `ServingError`."""
        arrived = self.generation.arrived()
        now_ns, left = monotonic_ns(), min(len(arrived), _TAKEN_AT_ONCE)
        self._byte_size = 0
        while left and self._byte_size < receiver.taken_byte_size:
            left -= self._take_run(arrived, left, receiver, now_ns)
        return bool(arrived)

    def _take_run(self, arrived: Arrived, most: int, receiver: Receiver, now_ns: int) -> int:
        """Take responses of one choice that have come together, at most `most`, and return how many. Raises as `take`.

        They are counted once for all, also for the credit of the model. Most are nothing but text: those are taken
        without what the others need.
        """
        call, meter, output, version = arrived[0][0], self._meter, self._output, self._version
        number, count, texts, byte_size = call.number, 0, 0, self._byte_size
        plain, most_bytes = not call.ended and receiver.is_plain(number), receiver.taken_byte_size
        try:
            while count < most and byte_size < most_bytes:
                arrival = arrived.popleft()
                if arrival[0] is not call:
                    arrived.appendleft(arrival)
                    break
                response = arrival[1]
                if isinstance(response, Exception):
                    raise_refusal(response, f"a request to model '{self._model}'")
                count += 1
                if plain and response.model_version == version:
                    text = whole_text(response, output)
                    if text is not None:
                        receiver.add_plain(number, text)
                        texts += 1
                        byte_size += len(text)
                        continue
                text_left = long_text(response, output) if receiver.takes_parts and not call.ended else None
                if text_left is not None and len(text_left) - self._place > PART_BYTE_SIZE:
                    arrived.appendleft(arrival)  # until its last part is taken
                    count -= 1
                    byte_size += self._take_part(call, text_left, receiver)
                    continue
                place, self._place = self._place, 0
                try:
                    byte_size += self._take(call, response, receiver, now_ns, place)
                finally:
                    response.release()
                plain, version = not call.ended and receiver.is_plain(number), self._version
        finally:
            if texts:
                meter.add_texts(texts)
            if meter.came(number, now_ns):
                call.first_token_came(now_ns)
        self._byte_size = byte_size
        call.consumed(count)
        return count

    def _take_part(self, call: ChoiceCall, text: memoryview, receiver: Receiver) -> int:
        """Take a part of a long text, but not the last part, and return how many bytes it has."""
        place, self._place = self._place, self._place + PART_BYTE_SIZE
        if not receiver.is_stopped(call.number):
            receiver.add(call.number, Piece(bytes(text[place : self._place])))
        return PART_BYTE_SIZE

    def _take(self, call: ChoiceCall, response: Response, receiver: Receiver, now_ns: int, place: int) -> int:
        """Take the rest of a response, whose text was taken up to `place`, and return how many bytes it has.

        Raises as `take`.
        """
        if call.ended:
            return 0
        number, meter, byte_size = call.number, self._meter, 0
        if response.error is not None and not receiver.is_finished(number):
            raise response.error
        if response.model_version != self._version and response.error is None:
            self._version = response.model_version
            meter.move(self._statistics_of(response.model_version))
        if response.outputs is not None:
            piece = read_piece(response, self._output)
            meter.add(number, piece)
            if place:
                piece.text = piece.text[place:]
            receiver.add(number, piece)
            byte_size = len(piece.text)
        if response.final:
            call.ended = True
        elif receiver.is_stopped(number):  # the model would go on for nothing
            call.ended = True
            call.cancel()
        if call.ended:
            self.open -= 1
            receiver.end(number)
            meter.ended(number, now_ns, receiver.tool_failures(number))
        return byte_size


async def _whole(
    call: OpenAiCall, progress: _ModelRequests, receiver: TextBody | ReadyBody | ResponseBody
) -> web.StreamResponse:
    """Return the response when the model has ended. Its text counts in the budget meanwhile."""
    budget, counted = call.door.kernel.budget, 0
    try:
        while progress.open:
            await progress.generation.wait()
            if progress.take(receiver):
                await asyncio.sleep(0)
            budget.add(receiver.byte_size - counted)
            counted = receiver.byte_size
        return await send_parts(call, receiver.parts())
    finally:
        budget.remove(counted)


async def send_parts(call: OpenAiCall, parts: Sequence[bytes | bytearray | memoryview]) -> web.StreamResponse:
    """Return the response with a body of these parts. A long one is sent here: to join it takes time and memory."""
    byte_size = sum(map(len, parts))
    if byte_size <= _LONG_BODY_BYTE_SIZE:
        return json_text_response(b"".join(parts))
    response = web.StreamResponse(headers={"Content-Type": JSON, **SERVER_HEADER, **call.response_headers})
    response.content_length = byte_size
    await response.prepare(call.http)
    block: list[bytes | bytearray | memoryview] = []
    block_byte_size = 0
    for part in parts:
        block.append(part)
        block_byte_size += len(part)
        if block_byte_size >= _BLOCK_BYTE_SIZE:
            await response.write(b"".join(block))
            await asyncio.sleep(0)
            block, block_byte_size = [], 0
    await response.write(b"".join(block))
    return response


async def _stream(
    call: OpenAiCall, progress: _ModelRequests, receiver: TextEvents | ReadyEvents | ResponseEvents
) -> web.StreamResponse:
    """Send chunks as they come: all that wait in one write. The first response decides the status.

    What the receiver keeps until the end counts in the budget.
    """
    silence, generation = call.door.silence, progress.generation
    budget, counted = call.door.kernel.budget, 0
    response = web.StreamResponse(headers=_EVENT_STREAM | call.response_headers)
    silence.add(generation)
    try:
        while progress.open:
            heard = await generation.wait()
            failure: ServingError | None = None
            more = False
            try:
                if heard:
                    more = progress.take(receiver)
            except ServingError as error:
                if not response.prepared:
                    raise
                failure = error
            events = receiver.take()
            generation.silent_s = 0
            if failure is not None:
                await _write_events(response, receiver, events)
                await _write_events(response, receiver, receiver.failure(failure))
                return response
            if receiver.byte_size != counted:
                budget.add(receiver.byte_size - counted)
                counted = receiver.byte_size
            if not response.prepared and (events or not heard or not progress.open):
                await response.prepare(call.http)
                silence.begun(generation)
            if events or not heard:
                await response.write(events or _COMMENT)
            if receiver.has_more:
                await _write_events(response, receiver, receiver.take())
            if more:  # others are served meanwhile
                await asyncio.sleep(0)
        receiver.end_stream()
        await _write_events(response, receiver, receiver.take())
        return response
    finally:
        budget.remove(counted)
        silence.remove(generation)


async def _write_events(
    response: web.StreamResponse, receiver: TextEvents | ReadyEvents | ResponseEvents, events: bytes
) -> None:
    """Write events, and further ones of `receiver`. Other clients are served between the parts of long ones."""
    if events:
        await response.write(events)
    while receiver.has_more:
        await asyncio.sleep(0)
        await response.write(receiver.take())


# ---- vectors ---------------------------------------------------------------------------------


_encode = msgspec.json.Encoder().encode

#: How many numbers become text before other clients are served: less than a millisecond.
_NUMBERS_AT_ONCE = 8192


async def embeddings(call: OpenAiCall) -> web.StreamResponse:
    """Return the vectors, in the order of the inputs. They count in the budget until they are sent."""
    budget, counted = call.door.kernel.budget, 0
    try:
        async with submitted(call, Api.EMBEDDINGS) as found:
            dialect = required_embedding_dialect(found.route.spec)
            vectors = _Vectors(found.generation, dialect, found.plan)
            try:
                while vectors.open:
                    await found.generation.wait()
                    vectors.take()
                    budget.add(vectors.byte_size - counted)
                    counted = vectors.byte_size
                    await asyncio.sleep(0)
            finally:  # the model has worked also for a client that has left, or whose other input has failed
                if call.key_use is not None:
                    call.key_use.spend(vectors.token_count)
            return await send_parts(call, vectors.parts(found.plan.model))
    finally:
        budget.remove(counted)


class _Vectors:
    """The vectors that have come, encoded."""

    def __init__(self, generation: Generation, dialect: EmbeddingDialect, plan: GenerationPlan) -> None:
        self._generation = generation
        self._dialect = dialect
        self._as_base64 = plan.as_base64
        self._encoded: list[bytes] = [b""] * len(generation.calls)
        self._tokens: list[int | None] = [*plan.input_tokens] or [None] * len(generation.calls)
        #: How many inputs have no vector yet.
        self.open = len(generation.calls)
        #: How many bytes the vectors take.
        self.byte_size = 0

    def take(self) -> None:
        """Encode what has come, a limited part of it. Raises `ServingError`."""
        arrived, numbers = self._generation.arrived(), 0
        while arrived and numbers < _NUMBERS_AT_ONCE:
            call, response = arrived.popleft()
            if isinstance(response, Exception):
                raise_refusal(response, "embeddings")
            try:
                if response.error is not None:
                    raise response.error
                if response.outputs is not None:
                    vector = self._dialect.vector(response)
                    numbers += len(vector) // 4
                    self._encoded[call.number] = encoded = self._encode(vector)
                    if (tokens := prompt_tokens(response)) is not None:
                        self._tokens[call.number] = tokens
                    self.byte_size += len(encoded)
                if response.final:
                    self.open -= 1
            finally:
                response.release()
            call.consumed(1)

    @property
    def token_count(self) -> int:
        """How many tokens the inputs have, as far as the model says it."""
        return sum(each for each in self._tokens if each is not None)

    def _encode(self, vector: bytes) -> bytes:
        if self._as_base64:
            return b'"%b"' % base64.b64encode(vector)
        return _encode(struct.unpack(f"<{len(vector) // 4}f", vector))

    def parts(self, model: str) -> list[bytes]:
        """Return the parts of the body. Raises `InternalError` for an input without a vector."""
        found = [b'{"object":"list","data":[']
        for number, encoded in enumerate(self._encoded):
            if not encoded:
                raise InternalError(f"the model has sent no vector for input {number}")
            comma = b"," if number else b""
            found += (comma + b'{"object":"embedding","index":%d,"embedding":' % number, encoded, b"}")
        tokens = [each for each in self._tokens if each is not None]
        usage = None
        if len(tokens) == len(self._encoded):
            usage = {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}
        return [*found, b"],", _encode({"model": model, "usage": usage})[1:]]


# ---- from a body to requests of the model ----------------------------------------------------


#: How many requests are submitted before other clients are served.
_SUBMITTED_AT_ONCE = 32


class SubmittedChoices(msgspec.Struct, frozen=True):
    """The requests to a model that one request of a client has become."""

    plan: GenerationPlan
    route: ModelRoute
    generation: Generation


@contextlib.asynccontextmanager
async def submitted(call: OpenAiCall, api: Api) -> AsyncGenerator[SubmittedChoices, None]:
    """Receive, decode and submit a request; at the end of the block what has not ended is cancelled.

    Raises `ServingError` for a request that is refused before.
    """
    door = call.door
    call.http[REQUEST_ID] = call.request_id
    begin_ns = monotonic_ns() if door.kernel.takes_times else 0
    with BodyCollector(door.kernel.memory_for_helper, call.http.content_length) as body:
        await call.read_body(body.add)
        peer = identity_of(call.http)
        prepared = await prepare(door.kernel, api, body, door.default_max_tokens, call.check_model, peer, door.texts)
    plan, route = prepared.plan, prepared.route
    find_peer = functools.partial(identity_of, call.http)
    head = GenerationHead(route, plan.model, call.request_id, call.http.raw_headers, find_peer, call.key)
    generation = Generation(door.intake, head, begin_ns)
    try:
        await _submit(generation, prepared.inputs)
        yield SubmittedChoices(plan, route, generation)
    finally:
        generation.close()


async def _submit(generation: Generation, waiting: list[list[Tensor]]) -> None:
    """Submit a request for each list of inputs. Those that cannot be submitted any more are released."""
    try:
        for number in range(len(waiting)):
            inputs, waiting[number] = waiting[number], []
            generation.submit(number, inputs)
            if number % _SUBMITTED_AT_ONCE == _SUBMITTED_AT_ONCE - 1:
                await asyncio.sleep(0)
    finally:
        for inputs in waiting:
            for tensor in inputs:
                tensor.release()


def raise_refusal(error: Exception, title: str) -> NoReturn:
    """Raise why a request was not submitted; an error that is a bug is logged under `title`."""
    raise error if isinstance(error, ServingError) else unexpected_error(title, error)
