"""Which requests are plain enough for the fast path, found from the bytes of their head alone; heads are remembered.

The fast path takes only unambiguous heads. If it is not certain where a message ends, aiohttp gets the connection
before any byte of the body is read, so that two parsers can never disagree about a message.

Behind the parser are the heads that were seen before. What depends on the head alone is found out once, and holds as
long as no model changes: the model, the header of a restricted API, what says that a web page sends it, the headers
that are forwarded to the model, CORS, the coding of the response.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httptools
import msgspec

from kernel.errors import ServedElsewhere, ServingError
from kernel.records.traced_passage import EXPLAIN_HEADER
from kernel.serving.prepared import PreparedCache
from protocols.access import Category
from protocols.http.endpoints.infer import infer
from protocols.http.fast.response_bytes import header_lines
from protocols.http.inference.compression import IDENTITY, choose_encoding
from protocols.http.inference.infer_call import ENTRY_POINT, EXPLAINS, HEADER_LENGTH
from protocols.http.inference.prepared import InferRequestHead
from protocols.http.responses import RESTRICTED, HttpResponse, http_error
from protocols.http.routes import find_endpoint, request_path
from protocols.request_limits import MAX_BODY_BYTE_SIZE
from protocols.status import HTTP_STATUS

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocols.http.inference.infer_call import HttpInference
    from protocols.http.request_rules import RequestRules

END = b"\r\n\r\n"

#: Larger heads are aiohttp's, whose limits are larger.
MAX_BYTE_SIZE = 8 << 10

_MAX_HEADERS = 128

_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})

#: Headers that change how the message or the connection continues, and what `Connection` may say.
_UNUSUAL = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"trailer"})

_PERSISTENT = frozenset({b"", b"keep-alive", b"Keep-Alive"})

_CLOSING = frozenset({b"close", b"Close"})

_CONNECTION = _PERSISTENT | _CLOSING

#: Sizes that need no thought about their range.
_NUMBER = re.compile(rb"[0-9]{1,18}")

#: How every plain request begins.
_BEGINNING = re.compile(rb"[A-Z]{1,10}(?: (?:/[!-~]*(?: [HTP/1.]{0,8}(?:\r(?:\n.*)?)?)?)?)?", re.DOTALL)

_HEADER_LENGTH = HEADER_LENGTH.lower().encode()


class InferFields(msgspec.Struct, frozen=True):
    """What the head of an inference request says to the fast path."""

    model_name: str
    model_version: str
    #: Bytes of the body that are JSON; 0 for a raw request.
    header_length: int
    #: The content coding of the response.
    encoding: str


class HttpRequestHead(msgspec.Struct, frozen=True):
    """A head whose message ends `content_length` bytes after it."""

    #: The request target as it was sent.
    target: str
    content_length: int
    #: None where aiohttp serves the request: it is not one of inference, or its sizes make it be refused.
    infer: InferFields | None = None
    #: Names and values as they were sent; no name comes twice.
    headers: tuple[tuple[bytes, bytes], ...] = ()
    #: Whether the client wants the connection closed after the response.
    closes: bool = False

    def header(self, name: str) -> bytes | None:
        """Return the value of a header by its name in any case of letters, None if it is absent."""
        wanted = name.lower().encode()
        return next((value.strip(b" \t") for found, value in self.headers if found.lower() == wanted), None)


class _Fields:
    """Receives what the parser finds."""

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        #: Names and values as they were sent, and values by the names in lower case.
        self.sent: list[tuple[bytes, bytes]] = []
        self.headers: dict[bytes, bytes] = {}
        self.complete = False

    @property
    def repeated(self) -> bool:
        """Whether a header comes twice: which of both counts is for aiohttp to say."""
        return len(self.sent) > len(self.headers)

    def on_url(self, part: bytes) -> None:
        self.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self.sent.append((name, value))
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.complete = True


def can_become_head(begun: bytes) -> bool:
    """Whether more bytes can make `begun` a head for `parse_head`. What cannot is aiohttp's at once."""
    return (
        len(begun) < MAX_BYTE_SIZE
        and begun.count(b"\n") == begun.count(b"\r\n")
        and _BEGINNING.fullmatch(begun) is not None
    )


def parse_head(
    text: bytes, max_input_size: int, is_label: Callable[[str, str], bool] | None = None
) -> HttpRequestHead | None:
    """Return what the head `text`, up to and with its empty line, says; None where that is not beyond doubt.

    `is_label` says whether a model has a label; None: none has.
    """
    fields = _parse(text)
    if fields is None or not _is_plain(fields):
        return None
    content_length = int(fields.headers.get(b"content-length", b"0"))
    infer_fields = _infer_fields(fields, max_input_size, is_label)
    closes = fields.headers.get(b"connection") in _CLOSING
    if closes and infer_fields is None:
        return None  # aiohttp responds, and closes
    return HttpRequestHead(fields.target.decode(), content_length, infer_fields, tuple(fields.sent), closes)


def _parse(text: bytes) -> _Fields | None:
    # Characters beyond ASCII and folded lines are legal for some and not for others.
    if not text.isascii() or b"\n " in text or b"\n\t" in text or not can_become_head(text):
        return None
    fields = _Fields()
    parser = httptools.HttpRequestParser(fields)
    try:
        parser.feed_data(text)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    if not fields.complete or parser.get_http_version() != "1.1":
        return None
    fields.method = parser.get_method()
    return fields


def _is_plain(fields: _Fields) -> bool:
    headers = fields.headers
    return (
        fields.method in _METHODS
        and not fields.repeated
        and len(headers) <= _MAX_HEADERS
        and _UNUSUAL.isdisjoint(headers)
        and b"host" in headers
        and headers.get(b"connection", b"") in _CONNECTION
        and _NUMBER.fullmatch(headers.get(b"content-length", b"0")) is not None
    )


def _infer_fields(
    fields: _Fields, max_input_size: int, is_label: Callable[[str, str], bool] | None
) -> InferFields | None:
    """Return what the fast path needs, None if the request is not one of inference, or will be refused."""
    found = find_endpoint(request_path(fields.target.decode()), is_label)
    if found is None or found[0].handlers.get(fields.method.decode()) is not infer:
        return None
    headers, names = fields.headers, found[1]
    size = headers.get(b"content-length")
    if size is None or headers.get(b"content-encoding", b"identity") != b"identity":
        return None
    announced = headers.get(_HEADER_LENGTH, size)
    if _NUMBER.fullmatch(announced) is None:
        return None
    body_byte_size, header_length = int(size), int(announced)
    limit = MAX_BODY_BYTE_SIZE if header_length and announced is not size else max_input_size
    if header_length > min(body_byte_size, max_input_size) or body_byte_size > limit:
        return None
    offers = headers.get(b"accept-encoding")
    encoding = choose_encoding(offers.decode()) if offers is not None else IDENTITY
    return InferFields(names["model"], names["version"], header_length, encoding)


# ---- heads that were seen before -------------------------------------------------------------


#: How many heads are kept, and how long they may be.
MAX_HEADS = 256

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

    @property
    def served_elsewhere(self) -> bool:
        """Whether it is the head of an inference request that another process serves."""
        return self.infer is None and self.refusal is None and self.head is not None and self.head.infer is not None


class KnownRequestHeads:
    """The heads that the fast path has seen, on all connections."""

    def __init__(self, inference: HttpInference, rules: RequestRules) -> None:
        self._inference = inference
        self._rules = rules
        self.cache: PreparedCache[bytes, KnownRequestHead] = PreparedCache(MAX_HEADS)
        #: Heads of requests whose body is JSON as a whole, by their text without the length of the body: numbers in
        #: JSON are longer and shorter from request to request.
        self._without_length: PreparedCache[bytes, KnownRequestHead] = PreparedCache(MAX_HEADS)

    def find(self, text: bytes) -> KnownRequestHead:
        """Return what is known of the head `text`, up to and with its empty line."""
        generation, cache = self._inference.kernel.catalog.generation, self.cache
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
                if len(cache.entries) < MAX_HEADS:
                    cache.add(text, known)
                return known
        known = self._look_at(text, generation)
        if known.served_elsewhere:
            return known  # the next one asks again
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
        try:
            found = self._admit(head, head.infer, headers)
        except ServedElsewhere:
            return KnownRequestHead(text, generation, head)
        if isinstance(found, HttpResponse):
            return KnownRequestHead(text, generation, head, refusal=Refusal(found, headers))
        return KnownRequestHead(text, generation, head, found)

    def _admit(self, head: HttpRequestHead, fields: InferFields, headers: bytes) -> InferRequestHead | HttpResponse:
        """Return what a request with this head is, or the response that refuses it: in the order of `HttpServer`.

        Raises `ServedElsewhere`.
        """
        refusal = self._rules.refusal("POST", Category.INFERENCE, head.header)
        if refusal is not None:
            return http_error(RESTRICTED, refusal, plain=True)
        try:
            route = self._inference.kernel.unary_route(fields.model_name, fields.model_version, ENTRY_POINT)
        except ServedElsewhere:
            raise
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
