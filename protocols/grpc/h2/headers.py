"""Header blocks: of requests they are decoded to request heads, of responses they are encoded. Pure.

gRPC clients repeat the header block of a request byte by byte. As long as the HPACK table does not change, the same
bytes mean the same headers, and are decoded once. Responses add nothing to the client's table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from hpack import Decoder, HPACKError, OversizedHeaderListError

from protocols.grpc.grpclib_internals import decode_bin_value, decode_timeout, encode_grpc_message
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode
from protocols.grpc.h2.limits import MAX_HEADER_LIST_BYTE_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Fields = list[tuple[str, str]]

#: How many header blocks of one connection are remembered, how large each may be, and what their fields may take.
_MAX_KNOWN_BLOCKS = 64
_MAX_KNOWN_BLOCK_BYTE_SIZE = 1024
_MAX_KNOWN_BYTE_SIZE = 128 << 10

#: About how many bytes a field takes beside its characters. Two bytes of a block can stand for a field.
_FIELD_BYTE_SIZE = 200

#: Fields that HTTP/2 does not have (RFC 9113, 8.2.2).
_CONNECTION_FIELDS = {"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"}
_PSEUDO_FIELDS = {":method", ":scheme", ":path", ":authority"}
_SINGLE_FIELDS = {"host", "content-length", "content-type", "te"}
_NAME_CHARACTERS = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")

#: A timeout has at most eight digits and a unit (gRPC over HTTP/2).
_TIMEOUT_LENGTH = 9


class RequestHead(msgspec.Struct, frozen=True):
    """The headers of a request."""

    fields: Fields
    #: Why it is malformed (RFC 9113, 8.1.1); empty for a well-formed one.
    fault: str = ""
    path: str = ""
    #: Whether it is a gRPC call that carries protobuf messages.
    is_grpc: bool = False
    #: How messages with the compressed flag are compressed.
    encoding: str = "identity"
    #: None for a call without a deadline.
    timeout_s: float | None = None
    timeout_valid: bool = True
    content_length: int | None = None
    #: About how many bytes the fields take in memory: a block of few bytes can stand for 100 KiB.
    byte_size: int = 0


class RequestHeadDecoder:
    """Decodes all header blocks of one connection, in the order in which they arrive."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_LIST_BYTE_SIZE)
        #: Request heads by the header blocks that stand for them, as long as the HPACK table does not change.
        self.known: dict[bytes, RequestHead] = {}
        self._known_byte_size = 0

    def decode(self, block: bytes) -> RequestHead:
        """Return the request head that `block` stands for. Raises `ConnectionFailure`."""
        head = self.known.get(block)
        return head if head is not None else self._decode(block)

    def _decode(self, block: bytes) -> RequestHead:
        table = self._decoder.header_table
        before = (table.maxsize, tuple(table.dynamic_entries))
        try:
            decoded = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError:
            raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "header list too large") from None
        except HPACKError as error:
            raise ConnectionFailure(H2ErrorCode.COMPRESSION_ERROR, str(error)) from None
        head = request_head([(_text(name), _text(value)) for name, value in decoded])
        if before != (table.maxsize, tuple(table.dynamic_entries)):
            self._forget_known()
        elif len(block) <= _MAX_KNOWN_BLOCK_BYTE_SIZE and head.byte_size <= _MAX_KNOWN_BYTE_SIZE:
            if len(self.known) >= _MAX_KNOWN_BLOCKS or self._known_byte_size + head.byte_size > _MAX_KNOWN_BYTE_SIZE:
                self._forget_known()
            self.known[block] = head
            self._known_byte_size += head.byte_size
        return head

    def _forget_known(self) -> None:
        self.known.clear()
        self._known_byte_size = 0


def _text(octets: bytes | str) -> str:
    return octets if isinstance(octets, str) else octets.decode("latin-1")


def request_head(fields: Fields) -> RequestHead:
    """Return the request head that the fields of a request make."""
    values = dict(fields)
    byte_size = sum(len(name) + len(value) for name, value in fields) + _FIELD_BYTE_SIZE * len(fields)
    if fault := _fault(fields, values):
        return RequestHead(fields, fault, byte_size=byte_size)
    timeout_s, timeout_valid = _timeout(fields)
    length = values.get("content-length")
    return RequestHead(
        fields,
        path=values[":path"],
        is_grpc=_is_grpc(values),
        encoding=values.get("grpc-encoding", "identity"),
        timeout_s=timeout_s,
        timeout_valid=timeout_valid,
        content_length=None if length is None else int(length),
        byte_size=byte_size,
    )


def _fault(fields: Fields, values: dict[str, str]) -> str:
    """Return why a request is malformed (RFC 9113, 8.2 and 8.3), or an empty text.

    Spaces at the begin and the end of values are taken, although that RFC forbids them: gRPC's clients send metadata as
    it is, and its servers take it.
    """
    seen: set[str] = set()
    regular = False
    for name, value in fields:
        if name.startswith(":"):
            if regular:
                return "a pseudo field after a regular one"
            if name not in _PSEUDO_FIELDS or name in seen:
                return "an unknown or repeated pseudo field"
        else:
            regular = True
            if fault := _field_fault(name, value):
                return fault
            if name in _SINGLE_FIELDS and name in seen:
                return f"more than one {name}"
        if any(c in value for c in "\0\r\n"):
            return "a field value with characters that it cannot have"
        seen.add(name)
    if not {":method", ":scheme", ":path"} <= seen or not values[":path"]:
        return "a pseudo field is missing"
    return ""


def _field_fault(name: str, value: str) -> str:
    if not name or not _NAME_CHARACTERS.issuperset(name):
        return "a field name with characters that it cannot have"
    if name in _CONNECTION_FIELDS or (name == "te" and value != "trailers"):
        return f"{name} is not for HTTP/2"
    if name == "content-length" and not (value.isascii() and value.isdigit() and len(value) <= 19):
        return "content-length is not a number"
    if name.endswith("-bin"):
        try:
            decode_bin_value(value.encode("ascii"))
        except ValueError:
            return f"{name} is not base64"
    return ""


def _is_grpc(values: dict[str, str]) -> bool:
    """Whether the call is gRPC with protobuf messages; grpclib refuses others with a text for each reason."""
    content_type, _, kind = values.get("content-type", "").partition("+")
    is_protobuf = content_type == "application/grpc" and kind in ("", "proto")
    return is_protobuf and values[":method"] == "POST" and values.get("te") == "trailers"


def _timeout(fields: Fields) -> tuple[float | None, bool]:
    """Return the shortest timeout that the call asks for, and whether all of them are valid."""
    texts = [value for name, value in fields if name == "grpc-timeout"]
    try:
        if any(len(text) > _TIMEOUT_LENGTH for text in texts):
            return None, False
        return min(map(decode_timeout, texts), default=None), True
    except ValueError:
        return None, False


# ---- responses ------------------------------------------------------------------------------


def encode_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return a header block that neither uses nor changes the client's table (RFC 7541, 6.2.2)."""
    block = bytearray()
    for name, value in fields:
        block += b"\x00"
        for text in (name, value):
            octets = text.encode("latin-1")
            block += _length(len(octets))
            block += octets
    return bytes(block)


def _length(number: int) -> bytes:
    """Return the length of a string as an integer with a prefix of seven bits (RFC 7541, 5.1)."""
    if number < 0x7F:
        return bytes([number])
    octets = bytearray([0x7F])
    number -= 0x7F
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)


_RESPONSE_FIELDS = [(":status", "200"), ("content-type", "application/grpc+proto")]

#: Headers of a response with a message, and its trailers. `0x88` is `:status: 200` of the static table.
RESPONSE_BLOCK = b"\x88" + encode_block(_RESPONSE_FIELDS[1:])
OK_TRAILERS_BLOCK = encode_block([("grpc-status", "0")])


#: Trailers of a call that found no memory or a full queue, or whose client has used up its quota: when it may be made
#: again, in milliseconds. Clients with a retry policy wait that long.
RETRY_LATER = (("grpc-retry-pushback-ms", "1000"),)


class Trailers(msgspec.Struct, frozen=True):
    """The header block that ends a response, with the status that it stands for."""

    block: bytes
    #: None in the response to a request that is not gRPC, which has only the status of HTTP.
    grpc_status: int | None
    http_status: str = "200"


OK_TRAILERS = Trailers(OK_TRAILERS_BLOCK, 0)

#: The text that gRPC's own servers send with this status; grpclib sends none.
_DEADLINE_EXCEEDED, _DEADLINE_TEXT = "4", "Deadline Exceeded"


def encode_trailers(fields: Fields) -> Trailers:
    """Return trailers with `fields`, which may include fields of headers."""
    values = dict(fields)
    status = values.get("grpc-status")
    if status == _DEADLINE_EXCEEDED and "grpc-message" not in values:
        fields = [*fields, ("grpc-message", _DEADLINE_TEXT)]
    return Trailers(encode_block(fields), None if status is None else int(status), values.get(":status", "200"))


def status_trailers(status: int, text: str | None, more: Sequence[tuple[str, str]] = ()) -> Trailers:
    """Return trailers that are headers as well: a response without a message. `text` is percent-encoded here."""
    fields = [("grpc-status", str(status))]
    if text is None and fields[0][1] == _DEADLINE_EXCEEDED:
        text = _DEADLINE_TEXT
    if text is not None:
        fields.append(("grpc-message", encode_grpc_message(text)))
    return Trailers(RESPONSE_BLOCK + encode_block([*fields, *more]), status)
