"""Typed tensor contents (`InferTensorContents`) to a tensor's raw bytes. Pure.

The order in which the fields are looked at, and the texts, are Triton's (`InferGRPCToInput` in
infer_handler.cc). Numbers are packed in the machine's order, which is the wire's: little-endian.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InvalidArgument
from protocols.grpc.generated.grpc_service_pb2 import InferTensorContents
from shm.datatypes import DATATYPES
from shm.strings import encode_strings

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Field(msgspec.Struct, frozen=True):
    """One repeated field: the datatype it stands for, smaller ones that it also carries, its array type."""

    datatype: str
    narrower: tuple[str, ...] = ()
    #: Type code of `array.array`; empty for BYTES.
    typecode: str = ""


_FIELDS: dict[int, _Field] = {
    InferTensorContents.BOOL_CONTENTS_FIELD_NUMBER: _Field("BOOL", typecode="B"),
    InferTensorContents.INT_CONTENTS_FIELD_NUMBER: _Field("INT32", ("INT8", "INT16"), "i"),
    InferTensorContents.INT64_CONTENTS_FIELD_NUMBER: _Field("INT64", typecode="q"),
    InferTensorContents.UINT_CONTENTS_FIELD_NUMBER: _Field("UINT32", ("UINT8", "UINT16"), "I"),
    InferTensorContents.UINT64_CONTENTS_FIELD_NUMBER: _Field("UINT64", typecode="Q"),
    InferTensorContents.FP32_CONTENTS_FIELD_NUMBER: _Field("FP32", typecode="f"),
    InferTensorContents.FP64_CONTENTS_FIELD_NUMBER: _Field("FP64", typecode="d"),
    InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER: _Field("BYTES"),
}


def pack_contents(contents: InferTensorContents, datatype: str, tensor: str, model: str) -> bytes:
    """Return the elements of `contents` as a tensor of `datatype`; without elements no bytes.

    How many elements there are is not checked here. `tensor` and `model` are for the error texts.
    Raises `InvalidArgument` where a field does not fit `datatype` or more than one is set.
    """
    packed: bytes | None = None
    for descriptor, values in contents.ListFields():  # set fields only, by number: Triton's order
        field = _FIELDS[descriptor.number]
        if packed is not None:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor}' for model '{model}', "
                "binary data was already supplied."
            )
        if datatype != field.datatype and datatype not in field.narrower:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor}' for model '{model}' of type "
                f"'{field.datatype}', expected datatype '{datatype}'"
            )
        packed = _pack_numbers(values, field.typecode, datatype) if field.typecode else encode_strings(values)
    return packed or b""


def _pack_numbers(values: Iterable[Any], typecode: str, datatype: str) -> bytes:
    wide: array[Any] = array(typecode, values)
    narrow = DATATYPES[datatype]
    if narrow.byte_size == wide.itemsize:
        return wide.tobytes()
    # Triton casts without a bound check: the low bytes of every element stay.
    parts: array[Any] = array(narrow.typecode, wide.tobytes())
    return parts[:: wide.itemsize // narrow.byte_size].tobytes()
