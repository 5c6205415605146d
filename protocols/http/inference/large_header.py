"""Checks how many parts the JSON header of a large request has, before objects are made of them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocols.http.json.document import UNDECODABLE
from protocols.http.json.elements import count_parts
from protocols.request_limits import MAX_PARTS, check_count

if TYPE_CHECKING:
    from shm.tensor import Buffer


class _Parts(msgspec.Struct):
    """What may have many parts in a header, and in each of its inputs and outputs. Empty where it is missing."""

    inputs: msgspec.Raw = msgspec.Raw()
    outputs: msgspec.Raw = msgspec.Raw()
    shape: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_parts_decoder = msgspec.json.Decoder(_Parts)
_elements_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def check_parts(header: Buffer) -> None:
    """Raise `InvalidArgument` for too many inputs, outputs, parameters or dimensions.

    Whatever else is wrong with `header` is reported when it is decoded.
    """
    try:
        parts = _parts_decoder.decode(header)
    except UNDECODABLE:
        return
    _check("parameters", parts.parameters)
    for what, tensors in (("inputs", parts.inputs), ("outputs", parts.outputs)):
        _check(what, tensors)
        for tensor in _elements(tensors):
            try:
                of_tensor = _parts_decoder.decode(tensor)
            except UNDECODABLE:
                continue
            _check("dimensions of a shape", of_tensor.shape)
            _check("parameters of a tensor", of_tensor.parameters)


def _check(what: str, text: msgspec.Raw) -> None:
    if bytes(memoryview(text)[:1]) in (b"[", b"{"):
        check_count(what, count_parts(memoryview(text), MAX_PARTS))


def _elements(text: msgspec.Raw) -> list[msgspec.Raw]:
    try:
        return _elements_decoder.decode(text)
    except UNDECODABLE:
        return []
