"""Content codings of inference bodies: which one to use, and gzip and deflate both ways. Pure."""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument, Unsupported
from protocols.request_limits import decompression_limit, ratio_exceeded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shm.tensor import Buffer

IDENTITY, GZIP, DEFLATE = "identity", "gzip", "deflate"

#: What the server understands, for `Accept-Encoding` of a refusal.
SUPPORTED = "gzip, deflate"

#: zlib's window bits. For reading one value stands for both formats; for writing each has its own.
_READ_EITHER = 47
_WRITE = {GZIP: 31, DEFLATE: 15}


class UnsupportedCompression(Unsupported):
    """The body has a content coding that the server does not know, or several."""

    def __init__(self) -> None:
        super().__init__("Unsupported compression type")


def check_encoding(content_encoding: str | None) -> str:
    """Return the coding that a `Content-Encoding` header names. Raises `UnsupportedCompression`."""
    if content_encoding is None:
        return IDENTITY
    if content_encoding not in (IDENTITY, GZIP, DEFLATE):
        raise UnsupportedCompression
    return content_encoding


def decompress(body: Buffer, byte_size_limit: int, ratio_limit: int = 0) -> bytes:
    """Return the content of a gzip or deflate `body`; bytes behind its end are ignored.

    Raises `InvalidArgument` for a body that is empty, broken, cut short, or larger than the limit once it
    is inflated; no more than the limit is ever inflated. `ratio_limit` is as for `decompression_limit`.
    """
    if not len(body):
        raise InvalidArgument("nothing to be decompressed")
    most = decompression_limit(len(body), byte_size_limit, ratio_limit)
    inflater = zlib.decompressobj(_READ_EITHER)
    try:
        content = inflater.decompress(body, most + 1)
    except zlib.error as error:
        raise InvalidArgument(f"unable to decompress the request body: {error}") from None
    if len(content) > byte_size_limit:
        raise inflated_too_large(byte_size_limit)
    if len(content) > most:
        raise InvalidArgument(ratio_exceeded(len(body), most, ratio_limit))
    if not inflater.eof:
        raise InvalidArgument("unable to decompress the request body: it is cut short")
    return content


def decompress_small(body: bytes, byte_size_limit: int) -> bytes | None:
    """Do the same for a small `body`; None if its content has more bytes than the limit."""
    try:
        inflater = zlib.decompressobj(_READ_EITHER)
        if len(inflater.decompress(body, byte_size_limit + 1)) > byte_size_limit:
            return None
    except zlib.error:
        pass  # `decompress` says what is wrong
    return decompress(body, byte_size_limit)


def inflated_too_large(byte_size_limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"Decompressed data size exceeds the maximum allowed value of {byte_size_limit} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def compress(body: bytes, encoding: str) -> bytes:
    """Return `body` in the coding `encoding`, which is gzip or deflate."""
    deflater = zlib.compressobj(wbits=_WRITE[encoding])
    return deflater.compress(body) + deflater.flush()


def compress_parts(parts: Iterable[Buffer], encoding: str) -> list[Buffer]:
    """Return a body that consists of `parts` in the coding `encoding`, in parts."""
    deflater = zlib.compressobj(wbits=_WRITE[encoding])
    return [*map(deflater.compress, parts), deflater.flush()]


@functools.lru_cache(maxsize=256)
def choose_encoding(accept_encoding: str) -> str:
    """Return the coding for a response: the one with the highest weight, among equal ones the first.

    Codings that are unknown are skipped, and so are those with the weight 0 or a weight that is not a number.
    """
    chosen, best = IDENTITY, 0.0
    for offer in accept_encoding.split(","):
        name, *parameters = (part.strip() for part in offer.split(";"))
        weight = _weight(parameters)
        if name in (IDENTITY, GZIP, DEFLATE) and weight > best:
            chosen, best = name, weight
    return chosen


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, text = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(text)
            except ValueError:
                return 0.0
    return 1.0
