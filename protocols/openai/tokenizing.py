"""POST /tokenize and /detokenize, as vLLM's server has them: token ids of a text or of a conversation, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.http.bodies import BodyCollector
from protocols.http.call import REQUEST_ID, identity_of
from protocols.openai.errors import ApiError
from protocols.openai.inference import send_parts
from protocols.openai.plans import Api
from protocols.openai.preparing import arguments_of, body_of, found_in

if TYPE_CHECKING:
    from protocols.http import web
    from protocols.openai.call import OpenAiCall

#: The names of the tasks (`protocols.openai.text_tasks`).
TOKENIZE, DETOKENIZE = "openai.tokenize", "openai.detokenize"

#: The bytes of a response that are sent at once.
_PART = 64 << 10


async def tokenize(call: OpenAiCall) -> web.StreamResponse:
    """Return the token ids of a text, or of a conversation as the model's chat template renders it."""
    return await _respond(call, Api.TOKENIZE, TOKENIZE)


async def detokenize(call: OpenAiCall) -> web.StreamResponse:
    """Return the text of token ids."""
    return await _respond(call, Api.DETOKENIZE, DETOKENIZE)


async def _respond(call: OpenAiCall, api: Api, task: str) -> web.StreamResponse:
    """Respond with what a text helper makes of a request. Raises `ServingError`."""
    kernel = call.door.kernel
    call.http[REQUEST_ID] = call.request_id
    with BodyCollector(kernel.memory_for_helper, call.http.content_length) as body:
        await call.read_body(body.add)
        async with body_of(kernel, api, body, call.check_model, identity_of(call.http)) as (route, _, sources):
            spec = route.spec
            if not spec.tokenizer_folder:
                raise ApiError(f"model '{spec.name}' has no tokenizer beside it (docs/openai.md)", param="model")
            message, output, _ = await call.door.texts.run(spec.name, task, arguments_of(api, spec), sources)
    found_in(message).check()
    assert output is not None, "a task without an error has an output"
    try:
        text = memoryview(output.raw())
        return await send_parts(call, [text[each : each + _PART] for each in range(0, len(text), _PART)])
    finally:
        output.release()
