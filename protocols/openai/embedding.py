"""POST /v1/embeddings: a vector for each input."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InternalError
from protocols.openai.dialects.embeddings import prompt_tokens, required_embedding_dialect
from protocols.openai.requests.plans import Api
from protocols.openai.submitting import raise_refusal, submitted

if TYPE_CHECKING:
    from protocols.http import web
    from protocols.openai.calls import OpenAiCall
    from protocols.openai.dialects.embeddings import EmbeddingDialect
    from protocols.openai.generation import Generation

_encode = msgspec.json.Encoder().encode

#: How many numbers become text before other clients are served: less than a millisecond.
_NUMBERS_AT_ONCE = 8192


async def embeddings(call: OpenAiCall) -> web.StreamResponse:
    """Return the vectors, in the order of the inputs. They count in the budget until they are sent."""
    budget, counted = call.door.kernel.budget, 0
    try:
        async with submitted(call, Api.EMBEDDINGS) as found:
            dialect = required_embedding_dialect(found.spec)
            vectors = _Vectors(found.generation, dialect, as_base64=found.plan.as_base64)
            while vectors.open:
                await found.generation.wait()
                vectors.take()
                budget.add(vectors.byte_size - counted)
                counted = vectors.byte_size
                await asyncio.sleep(0)
            return call.json(vectors.body(found.plan.model))
    finally:
        budget.remove(counted)


class _Vectors:
    """The vectors that have come, encoded."""

    def __init__(self, generation: Generation, dialect: EmbeddingDialect, *, as_base64: bool) -> None:
        self._generation = generation
        self._dialect = dialect
        self._as_base64 = as_base64
        self._encoded: list[bytes] = [b""] * len(generation.calls)
        self._tokens: list[int | None] = [None] * len(generation.calls)
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
                    self._tokens[call.number] = prompt_tokens(response)
                    self.byte_size += len(encoded)
                if response.final:
                    self.open -= 1
            finally:
                response.release()
            call.consumed(1)

    def _encode(self, vector: bytes) -> bytes:
        if self._as_base64:
            return b'"%b"' % base64.b64encode(vector)
        return _encode(struct.unpack(f"<{len(vector) // 4}f", vector))

    def body(self, model: str) -> bytes:
        """Return the body of the response. Raises `InternalError` for an input without a vector."""
        data = []
        for number, encoded in enumerate(self._encoded):
            if not encoded:
                raise InternalError(f"the model has sent no vector for input {number}")
            data.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (number, encoded))
        tokens = [each for each in self._tokens if each is not None]
        usage = None
        if len(tokens) == len(data):
            usage = {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}
        tail = _encode({"model": model, "usage": usage})
        return b'{"object":"list","data":[%b],%b' % (b",".join(data), tail[1:])
