"""Typed tensor contents (`InferTensorContents`) to a tensor's raw bytes. Pure.

The order in which the fields are checked, and the texts, are Triton's (`InferGRPCToInput` in
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


class ContentsField(msgspec.Struct, frozen=True):
    """One repeated field: the datatype it stands for, smaller ones that it also carries, its array type."""

    datatype: str
    narrower: tuple[str, ...] = ()
    #: Type code of `array.array`; empty for BYTES.
    typecode: str = ""


_FIELDS: dict[int, ContentsField] = {
    InferTensorContents.BOOL_CONTENTS_FIELD_NUMBER: ContentsField("BOOL", typecode="B"),
    InferTensorContents.INT_CONTENTS_FIELD_NUMBER: ContentsField("INT32", ("INT8", "INT16"), "i"),
    InferTensorContents.INT64_CONTENTS_FIELD_NUMBER: ContentsField("INT64", typecode="q"),
    InferTensorContents.UINT_CONTENTS_FIELD_NUMBER: ContentsField("UINT32", ("UINT8", "UINT16"), "I"),
    InferTensorContents.UINT64_CONTENTS_FIELD_NUMBER: ContentsField("UINT64", typecode="Q"),
    InferTensorContents.FP32_CONTENTS_FIELD_NUMBER: ContentsField("FP32", typecode="f"),
    InferTensorContents.FP64_CONTENTS_FIELD_NUMBER: ContentsField("FP64", typecode="d"),
    InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER: ContentsField("BYTES"),
}


class FoundContents(msgspec.Struct, frozen=True):
    """The elements of an input, checked against its datatype."""

    field: ContentsField
    values: Any
    datatype: str


#: How many strings become objects at a time.
_STRINGS_AT_A_TIME = 16384


def pack_contents(contents: InferTensorContents, datatype: str, tensor: str, model: str) -> bytes:
    """Return the elements of `contents` as a tensor of `datatype`; without elements no bytes.

    How many elements there are is not checked here. `tensor` and `model` are for the error texts.
    Raises `InvalidArgument` if a field does not fit `datatype` or more than one is set.
    """
    found = check_contents(contents, datatype, tensor, model)
    if found is None:
        return b""
    if found.field.typecode:
        return _pack_numbers(found.values, found.field.typecode, datatype)
    return encode_strings(found.values)


def check_contents(contents: InferTensorContents, datatype: str, tensor: str, model: str) -> FoundContents | None:
    """Return the elements of the field that is set; None if none is. Raises as `pack_contents`."""
    found: FoundContents | None = None
    for descriptor, values in contents.ListFields():  # set fields only, by number: Triton's order
        if found is not None:
            raise InvalidArgument(several_contents(tensor, model))
        found = FoundContents(check_field(descriptor.number, datatype, tensor, model), values, datatype)
    return found


def check_field(number: int, datatype: str, tensor: str, model: str) -> ContentsField:
    """Return the field `number` of contents. Raises `InvalidArgument` if it does not fit `datatype`."""
    field = _FIELDS[number]
    if datatype != field.datatype and datatype not in field.narrower:
        raise InvalidArgument(
            f"unexpected explicit tensor data for input tensor '{tensor}' for model '{model}' of type "
            f"'{field.datatype}', expected datatype '{datatype}'"
        )
    return field


def several_contents(tensor: str, model: str) -> str:
    """Return the error of an input for which several fields of its contents are set."""
    return (
        f"unexpected explicit tensor data for input tensor '{tensor}' for model '{model}', "
        "binary data was already supplied."
    )


def packed_size(contents: InferTensorContents, found: FoundContents) -> int:
    """Return the most bytes that the elements become.

    A string of n bytes takes n + 2 in a message, with its tag and length, or more, and n + 4 raw bytes.
    """
    if found.field.typecode:
        return len(found.values) * DATATYPES[found.datatype].byte_size
    return contents.ByteSize() * 2


def write_contents(found: FoundContents, memory: memoryview) -> int:
    """Write the raw bytes of the elements to `memory`, strings in pieces, and return how many they are."""
    values = found.values
    if found.field.typecode:
        packed = _pack_numbers(values, found.field.typecode, found.datatype)
        memory[: len(packed)] = packed
        return len(packed)
    position = 0
    for start in range(0, len(values), _STRINGS_AT_A_TIME):
        packed = encode_strings(values[start : start + _STRINGS_AT_A_TIME])
        memory[position : position + len(packed)] = packed
        position += len(packed)
    return position


def _pack_numbers(values: Iterable[Any], typecode: str, datatype: str) -> bytes:
    wide: array[Any] = array(typecode, values)
    narrow = DATATYPES[datatype]
    if narrow.byte_size == wide.itemsize:
        return wide.tobytes()
    # Triton casts without a bound check: the low bytes of every element stay.
    parts: array[Any] = array(narrow.typecode, wide.tobytes())
    return parts[:: wide.itemsize // narrow.byte_size].tobytes()
