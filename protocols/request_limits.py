"""Limits of requests that both protocols have. Pure.

They are the number of a request's parts, the sizes of its body and of what compressed bodies become, in bytes, and the
sizes from which on a request or response counts as large.
"""

from __future__ import annotations

from typing import Any, TypeVar

from kernel.errors import InvalidArgument

#: The largest body: gRPC's limit for messages (INT32_MAX), and Triton's for HTTP, whose Content-Length is an int.
MAX_BODY_BYTE_SIZE = 2**31 - 1

#: The largest body of a request that only controls the server: all but inference, and loads, which may bring files.
MAX_CONTROL_BYTE_SIZE = 64 * 2**10

#: From this size on, a request body is received into memory of its own, if possible of its model.
RECEIVE_BUFFER_BYTE_SIZE = 64 * 2**10

#: Up to about this size a response is copied into one piece; outputs of a larger one are written from their place.
COPIED_RESPONSE_BYTE_SIZE = 64 * 2**10

_List = TypeVar("_List", bound=list[Any])

#: The most inputs, outputs, parameters, and dimensions of a shape. Triton has no limit, and the models that people
#: serve have tens.
MAX_PARTS = 512


def check_count(what: str, count: int) -> None:
    """Raise `InvalidArgument` if a request has too many of `what`."""
    if count > MAX_PARTS:
        raise InvalidArgument(f"the request has too many {what}, expected at most {MAX_PARTS}")


def checked_list(what: str, parts: _List) -> _List:
    """Return `parts`. Raises `InvalidArgument` if they are too many."""
    check_count(what, len(parts))
    return parts


#: Content up to this size may be any number of times larger than the compressed bytes.
_UNLIMITED_RATIO_BYTE_SIZE = 1 << 20


def decompression_limit(byte_size: int, byte_size_limit: int, max_ratio: int) -> int:
    """Return the most bytes that `byte_size` compressed ones may become; with a `max_ratio` of 0 `byte_size_limit`."""
    return (
        min(byte_size_limit, max(_UNLIMITED_RATIO_BYTE_SIZE, byte_size * max_ratio)) if max_ratio else byte_size_limit
    )


def ratio_exceeded(byte_size: int, most: int, max_ratio: int) -> str:
    """Return the error of a compressed request that becomes larger than `decompression_limit` says."""
    return (
        f"the {byte_size} bytes of the compressed request become more than {most} bytes, {max_ratio} times as many. "
        "Use --max-decompression-ratio to increase the limit."
    )
