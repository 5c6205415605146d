"""Templates for responses that differ from the one before only in the id and the bytes of their outputs. Pure.

What stands in front of the outputs, the HTTP head and the JSON, is kept and not encoded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.response import Response
    from shm.tensor import Buffer

#: Longer JSON is not kept.
_MAX_JSON_BYTE_SIZE = 2048

#: What JSON with an id begins with.
_ID = b'{"id":'

_encode = msgspec.json.Encoder().encode


class ResponseTemplate:
    """How the last response to requests of one prepared body was written."""

    __slots__ = ("_head", "_id_byte_size", "_model", "_outputs", "_parameters", "_rest", "_written_s")

    def __init__(self) -> None:
        #: When the response was written: its head holds the time.
        self._written_s = -1.0
        self._model = ("", "")
        #: The JSON of its parameters; ensembles add those of the sequence to every response. Compared as JSON, because
        #: 1 equals True in Python.
        self._parameters = b""
        #: Name, datatype, shape and byte size of each output; -1 for one in the client's region.
        self._outputs: list[tuple[str, str, list[int], int]] = []
        #: What stands before the id, how long that was, and the JSON behind it.
        self._head = b""
        self._id_byte_size = 0
        self._rest = b""

    def fill_in(self, response: Response, now_s: float) -> bytes | None:
        """Return the HTTP response for `response`, with a copy of its outputs; None where more differs.

        `now_s` is a time that stays the same for as long as the time in a head may.
        """
        outputs = response.outputs
        id = _encode(response.id) if response.id else b""
        if (
            now_s != self._written_s
            or outputs is None
            or len(outputs) != len(self._outputs)
            or len(id) != self._id_byte_size
            or (response.model_name, response.model_version) != self._model
            or (_encode(response.parameters) if response.parameters else b"") != self._parameters
        ):
            return None
        pieces: list[Buffer] = [self._head, id, self._rest]
        for output, (name, datatype, shape, byte_size) in zip(outputs, self._outputs, strict=True):
            data = output.data
            if data is None:
                data = output.response_bytes()
            if data is None:
                if byte_size != -1:
                    return None
            elif len(data) == byte_size:
                pieces.append(data)
            else:
                return None
            if output.shape != shape or output.name != name or output.datatype != datatype:
                return None
        return b"".join(pieces)

    def remember(self, response: Response, body: Sequence[Buffer], head: bytes, now_s: float) -> None:
        """Make the template of `response`, which was written as `head` and `body`, if all its outputs are binary.

        The first part of `body` is JSON; the others are the outputs.
        """
        header = bytes(body[0])
        if len(header) > _MAX_JSON_BYTE_SIZE:
            return
        binary_count = 0
        outputs: list[tuple[str, str, list[int], int]] = []
        for output in response.outputs or ():
            byte_size = -1
            data = output.response_bytes()
            if data is not None:
                if output.datatype == "BYTES":
                    return  # the next one may have another length
                byte_size = len(data)
                binary_count += 1
            outputs.append((output.name, output.datatype, list(output.shape), byte_size))
        if binary_count != len(body) - 1:
            return  # others are part of the JSON
        self._outputs = outputs
        id = _encode(response.id) if response.id else b""
        self._parameters = _encode(response.parameters) if response.parameters else b""
        self._id_byte_size = len(id)
        begin = len(_ID) if id else 0
        self._head, self._rest = head + header[:begin], header[begin + len(id) :]
        self._model = response.model_name, response.model_version
        self._written_s = now_s
