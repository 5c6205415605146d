"""Checks that the bytes of a BYTES input match its shape. Texts are Triton's (infer_request.cc).

The worker checks, because the kernel does not read client memory.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument, InvalidRequest, request_prefix
from shm.datatypes import element_count

if TYPE_CHECKING:
    from shm.tensor import Tensor

_LENGTH = struct.Struct("<I")


def check_strings(tensor: Tensor, request_id: str, model: str) -> None:
    """Raise `InvalidArgument` or `InvalidRequest` unless `tensor` holds exactly the elements of its shape."""
    wanted = element_count(tensor.shape)
    found = position = 0
    data = tensor.data
    assert data is not None
    end = len(data)
    where = f"for inference input '{tensor.name}' for model '{model}'"
    while position < end:
        if end - position < 4:
            raise InvalidRequest(
                f"{request_prefix(request_id)}incomplete string length indicator {where}, expecting 4 bytes but "
                f"only {end - position} bytes available. Please make sure the string length indicator is in one "
                "buffer."
            )
        if found >= wanted:
            raise InvalidRequest(
                f"{request_prefix(request_id)}unexpected number of string elements {found + 1} {where}, "
                f"expecting {wanted}"
            )
        (length,) = _LENGTH.unpack_from(data, position)
        position += 4
        if length > end - position:
            raise InvalidArgument(  # the text of Triton's backends, which detect this (backend_common.cc)
                f"incomplete string data for inference input '{tensor.name}', expecting string of length {length} "
                f"but only {end - position} bytes available"
            )
        position += length
        found += 1
    if found != wanted:
        raise InvalidRequest(f"{request_prefix(request_id)}expected {wanted} string elements {where}, got {found}")
