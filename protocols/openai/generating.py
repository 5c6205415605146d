"""POST /v1/chat/completions and /v1/completions: a stream of chunks, or one body."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from kernel.errors import ServingError
from protocols.http import web
from protocols.http.responses import SERVER_HEADER
from protocols.openai.dialects.choosing import required_dialect
from protocols.openai.dialects.pieces import read_piece
from protocols.openai.errors import error_event
from protocols.openai.requests.plans import Api
from protocols.openai.responses.bodies import Identity
from protocols.openai.responses.receivers import ReadyBody, ReadyEvents, TextBody, TextEvents
from protocols.openai.submitting import raise_refusal, submitted

if TYPE_CHECKING:
    from kernel.serving.response import Response
    from protocols.openai.calls import OpenAiCall
    from protocols.openai.dialects.dialect import Dialect
    from protocols.openai.generation import ChoiceCall, Generation
    from protocols.openai.responses.receivers import Receiver

#: How many responses become chunks before other clients are served.
_TAKEN_AT_ONCE = 256

#: A comment, which clients ignore: something has to come, so that nobody takes the connection for dead.
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


async def _generate(call: OpenAiCall, api: Api) -> web.StreamResponse:
    async with submitted(call, api) as found:
        plan, dialect = found.plan, required_dialect(found.spec)
        prefix = "chatcmpl-" if api.is_chat else "cmpl-"
        identity = Identity(prefix + uuid.uuid4().hex, int(call.door.now_s()), plan.model)
        requests = _ModelRequests(found.generation, dialect, plan.model)
        if plan.stream:
            return await _stream(call, requests, (ReadyEvents if dialect.ready else TextEvents)(plan, identity))
        return await _whole(call, requests, (ReadyBody if dialect.ready else TextBody)(plan, identity))


class _ModelRequests:
    """How far the requests to the model are."""

    def __init__(self, generation: Generation, dialect: Dialect, model: str) -> None:
        self.generation = generation
        self._output = dialect.output
        self._model = model
        #: How many requests have not ended.
        self.open = len(generation.calls)

    def take(self, receiver: Receiver) -> bool:
        """Give `receiver` what has come, a limited part of it; returns whether there is more. Raises `ServingError`."""
        arrived = self.generation.arrived()
        last, count = None, 0
        for _ in range(min(len(arrived), _TAKEN_AT_ONCE)):
            call, response = arrived.popleft()
            if isinstance(response, Exception):
                raise_refusal(response, f"a request to model '{self._model}'")
            try:
                self._take(call, response, receiver)
            finally:
                response.release()
            if call is not last:  # responses of one choice come together: its model is given credit once for all
                if last is not None:
                    last.consumed(count)
                last, count = call, 0
            count += 1
        if last is not None:
            last.consumed(count)
        return bool(arrived)

    def _take(self, call: ChoiceCall, response: Response, receiver: Receiver) -> None:
        if call.ended:
            return
        number = call.number
        if response.error is not None and not receiver.is_finished(number):
            raise response.error
        if response.outputs is not None:
            receiver.add(number, read_piece(response, self._output))
        if response.final:
            call.ended = True
        elif receiver.is_stopped(number):  # the model would go on for nothing
            call.ended = True
            call.cancel()
        if call.ended:
            self.open -= 1
            receiver.end(number)


async def _whole(call: OpenAiCall, progress: _ModelRequests, receiver: TextBody | ReadyBody) -> web.StreamResponse:
    """Return the response when the model has ended. Its text counts in the budget meanwhile."""
    budget, counted = call.door.kernel.budget, 0
    try:
        while progress.open:
            await progress.generation.wait()
            if progress.take(receiver):
                await asyncio.sleep(0)
            budget.add(receiver.byte_size - counted)
            counted = receiver.byte_size
        return call.json(receiver.body())
    finally:
        budget.remove(counted)


async def _stream(call: OpenAiCall, progress: _ModelRequests, receiver: TextEvents | ReadyEvents) -> web.StreamResponse:
    """Send chunks as they come: all that wait in one write. The status is that of the first response."""
    silence, generation = call.door.silence, progress.generation
    response = web.StreamResponse(headers=_EVENT_STREAM | call.response_headers)
    silence.add(generation)
    try:
        while progress.open:
            heard = await generation.wait()
            failure: ServingError | None = None
            try:
                if heard:
                    progress.take(receiver)
            except ServingError as error:
                if not response.prepared:
                    raise
                failure = error
            events = receiver.take()
            generation.silent_s = 0
            if failure is not None:
                await response.write(events + error_event(failure))
                return response
            if not response.prepared and (events or not heard or not progress.open):
                await response.prepare(call.http)
                silence.begun(generation)
            if events or not heard:
                await response.write(events or _COMMENT)
        receiver.end_stream()
        await response.write(receiver.take())
        return response
    finally:
        silence.remove(generation)
