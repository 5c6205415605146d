"""Request heads that were seen before: what they say, and what the server makes of them as long as no model changes.

Whatever depends on the head alone is found out here, once: the model, the header of a restricted API, what says that
a web page sends it, the headers that are forwarded to the model, those of CORS, the coding of the response.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from kernel.tracing.explanation import EXPLAIN_HEADER
from protocols.access.restricted import Category
from protocols.http.fast.request_head import HttpRequestHead, InferFields, parse_head
from protocols.http.fast.response_bytes import header_lines
from protocols.http.inference.call import ENTRY_POINT, EXPLAINS
from protocols.http.inference.head import InferRequestHead
from protocols.http.inference.response import HttpResponse, http_error
from protocols.http.inference.response_task import HEADER_LENGTH
from protocols.http.responses import RESTRICTED
from protocols.prepared_cache import PreparedCache
from protocols.status import HTTP_STATUS

if TYPE_CHECKING:
    from protocols.http.inference.call import HttpInference
    from protocols.http.request_rules import RequestRules

#: How many heads are kept, and how long they may be.
_MAX_HEADS = 256
_MAX_BYTE_SIZE = 1024


_LENGTH_NAME = b"content-length"
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([1-9][0-9]{0,17})\r\n")


class Refusal(msgspec.Struct, frozen=True):
    """The response to an inference request that is refused whatever its body is."""

    response: HttpResponse
    #: As in `InferRequestHead`.
    response_headers: bytes


class KnownRequestHead(msgspec.Struct, frozen=True):
    """A head, and what became of it while the catalog of models was of `generation`: later it does not hold."""

    text: bytes
    generation: int
    #: What the head says; None where that is not beyond doubt.
    head: HttpRequestHead | None
    #: What the fast path does with an inference request: it submits it, or refuses it. Both are None where aiohttp
    #: serves the request.
    infer: InferRequestHead | None = None
    refusal: Refusal | None = None


class KnownRequestHeads:
    """The heads that the fast path has seen, on all connections."""

    def __init__(self, inference: HttpInference, rules: RequestRules) -> None:
        self._inference = inference
        self._rules = rules
        self._cache: PreparedCache[bytes, KnownRequestHead] = PreparedCache(_MAX_HEADS)
        #: Heads of requests whose body is JSON as a whole, by their text without the length of the body: numbers in
        #: JSON are longer and shorter from request to request.
        self._without_length: PreparedCache[bytes, KnownRequestHead] = PreparedCache(_MAX_HEADS)

    def find(self, text: bytes) -> KnownRequestHead:
        """Return what is known of the head `text`, up to and with its empty line."""
        generation, cache = self._inference.kernel.catalog.generation, self._cache
        if generation != cache.generation:
            cache.start_generation(generation)
            self._without_length.start_generation(generation)
        known = cache.entries.get(text)
        if known is not None:
            return known
        length = _LENGTH.search(text)
        key = b"" if length is None else text[: length.start(1)] + text[length.end(1) :]
        alike = self._without_length.entries.get(key)
        if alike is not None and length is not None:
            known = self._with_length(alike, text, length[1])
            if known is not None:
                if len(cache.entries) < _MAX_HEADS:
                    cache.add(text, known)
                return known
        known = self._look_at(text, generation)
        if len(text) <= _MAX_BYTE_SIZE:
            cache.add(text, known)
            if key and _may_have_other_length(known):
                self._without_length.add(key, known)
        return known

    def _with_length(self, alike: KnownRequestHead, text: bytes, digits: bytes) -> KnownRequestHead | None:
        """Return what is known of `text`, which is `alike` with another length; None for a length that is too large."""
        length, before, head = int(digits), alike.infer, alike.head
        if length > self._inference.max_input_size or before is None or head is None or head.infer is None:
            return None
        headers = tuple(
            (name, digits) if name.lower() == _LENGTH_NAME else (name, value) for name, value in before.headers
        )
        infer: InferRequestHead = before.__copy__()  # type: ignore[attr-defined]  # every msgspec.Struct has it
        for name, value in (("body_byte_size", length), ("header_length", length), ("headers", headers)):
            msgspec.structs.force_setattr(infer, name, value)
        fields = msgspec.structs.replace(head.infer, header_length=length)
        changed = msgspec.structs.replace(head, content_length=length, infer=fields, headers=headers)
        return KnownRequestHead(text, alike.generation, changed, infer)

    def _look_at(self, text: bytes, generation: int) -> KnownRequestHead:
        head = parse_head(text, self._inference.max_input_size, self._inference.kernel.catalog.has_label)
        if head is None or head.infer is None:
            return KnownRequestHead(text, generation, head)
        origin = head.header("Origin")
        headers = header_lines(self._rules.response_headers(None if origin is None else origin.decode()))
        found = self._admit(head, head.infer, headers)
        if isinstance(found, HttpResponse):
            return KnownRequestHead(text, generation, head, refusal=Refusal(found, headers))
        return KnownRequestHead(text, generation, head, found)

    def _admit(self, head: HttpRequestHead, fields: InferFields, headers: bytes) -> InferRequestHead | HttpResponse:
        """Return what a request with this head is, or the response that refuses it: in the order of `HttpServer`."""
        refusal = self._rules.refusal("POST", Category.INFERENCE, head.header)
        if refusal is not None:
            return http_error(RESTRICTED, refusal, plain=True)
        try:
            route = self._inference.kernel.unary_route(fields.model_name, fields.model_version, ENTRY_POINT)
        except ServingError as error:
            return http_error(HTTP_STATUS[error.code], error.text, plain=True)
        return InferRequestHead(
            route,
            fields.model_name,
            fields.model_version,
            head.target,
            head.content_length,
            fields.header_length,
            fields.encoding,
            self._rules.forwarded(head.headers),
            head.headers,
            headers,
            head.header(EXPLAIN_HEADER) in EXPLAINS,
        )


def _may_have_other_length(known: KnownRequestHead) -> bool:
    """Whether all but the length would be the same for a head with another one: JSON without binary data behind it, of
    which nothing is forwarded to the model. A head that is admitted has one length."""
    infer, head = known.infer, known.head
    if infer is None or head is None or infer.forwarded is not None:
        return False
    return 0 < infer.header_length == infer.body_byte_size and head.header(HEADER_LENGTH) is None
