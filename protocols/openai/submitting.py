"""From the body of a request to requests of the model: the same for all APIs of this front door."""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic_ns
from typing import TYPE_CHECKING, NoReturn

import msgspec

from kernel.errors import ServingError
from kernel.observe.repeats.internal_errors import unexpected_error
from protocols.access.peer_identity import peer_identity
from protocols.http.call import REQUEST_ID
from protocols.openai.generation import Generation, GenerationHead
from protocols.openai.requests.preparing import prepare

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kernel.config.spec import ModelSpec
    from protocols.openai.calls import OpenAiCall
    from protocols.openai.requests.plans import Api, GenerationPlan
    from shm.tensor import Tensor

#: How many requests are submitted before other clients are served.
_SUBMITTED_AT_ONCE = 32


class SubmittedChoices(msgspec.Struct, frozen=True):
    """The requests to a model that one request of a client has become."""

    plan: GenerationPlan
    spec: ModelSpec
    generation: Generation


@contextlib.asynccontextmanager
async def submitted(call: OpenAiCall, api: Api) -> AsyncGenerator[SubmittedChoices, None]:
    """Receive, decode and submit a request; at the end of the block what has not ended is cancelled.

    Raises `ServingError` for a request that is refused before.
    """
    door = call.door
    call.http[REQUEST_ID] = call.request_id
    begin_ns = monotonic_ns() if door.kernel.takes_times else 0
    body = await call.read_body()
    try:
        prepared = await prepare(door.kernel, api, body, door.default_max_tokens, call.check_model, _peer(call))
    finally:
        body.release()
    plan, route = prepared.plan, prepared.route
    head = GenerationHead(route, plan.model, call.request_id, call.http.raw_headers, lambda: _peer(call), call.key)
    generation = Generation(door.intake, head, begin_ns)
    try:
        await _submit(generation, prepared.inputs)
        yield SubmittedChoices(plan, route.spec, generation)
    finally:
        generation.close()


def _peer(call: OpenAiCall) -> str:
    """Return who the client is; empty if it has disconnected."""
    try:
        return peer_identity(call.http.transport)
    except ServingError:
        return ""


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
