from __future__ import annotations

import numpy as np
import pytest

from backends.python.datatypes import (
    TRITON_STRING_TO_NUMPY,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)


def test_configuration_names_are_numpy_types() -> None:
    assert triton_string_to_numpy("TYPE_FP32") is np.float32
    assert triton_string_to_numpy("TYPE_STRING") is np.object_
    assert triton_string_to_numpy("TYPE_BOOL") is bool
    assert len(TRITON_STRING_TO_NUMPY) == 13
    with pytest.raises(KeyError):
        triton_string_to_numpy("TYPE_BF16")


def test_datatypes_have_triton_s_numbers() -> None:
    types = [triton_to_numpy_type(number) for number in range(1, 14)]
    assert types[0] is np.bool_
    assert types[10] is np.float32
    assert types[12] is np.object_
    assert [numpy_to_triton_type(dtype) for dtype in types] == list(range(1, 14))
    assert triton_to_numpy_type(99) is None


@pytest.mark.parametrize("other", [np.complex64, np.str_, None, "nonsense"])
def test_other_types_have_no_number(other: object) -> None:
    assert numpy_to_triton_type(other) is None


def test_byte_strings_have_the_number_of_strings() -> None:
    assert numpy_to_triton_type(np.bytes_) == 13
    assert numpy_to_triton_type(np.array([b"abc"]).dtype) == 13


def test_serialized_strings_are_deserialized_to_the_same_array() -> None:
    array = np.array([[b"a", "ü"], [b"", 5]], object)
    raw = serialize_byte_tensor(array)
    assert raw == b"\1\0\0\0a\2\0\0\0\xc3\xbc\0\0\0\0\1\0\0\x005"
    read = deserialize_bytes_tensor(raw)
    assert read.dtype == object
    assert read.tolist() == [b"a", "ü".encode(), b"", b"5"]


def test_only_strings_are_serialized() -> None:
    assert serialize_byte_tensor(np.array([], object)) == ()
    assert serialize_byte_tensor(np.zeros(2)) is None
    assert serialize_byte_tensor(np.array([b"ab", b"c"])) == b"\2\0\0\0ab\1\0\0\0c"
