"""Arrays of a program become tensors, and tensors become arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernel.embedding.arrays import input_tensor, output_array
from kernel.errors import InvalidArgument
from shm.arena import INLINE_LIMIT
from shm.tensor import Tensor


def echoed(value: Any, datatype: str | None = None) -> Any:
    """Return the output array of a model that returns its input."""
    tensor = input_tensor("IN", value, datatype)
    return output_array(Tensor("OUT", tensor.datatype, tensor.shape, tensor.data))


@pytest.mark.parametrize("dtype", ["bool", "u1", "i2", "<u4", "i8", "f2", "<f4", "f8", ">f4", ">i2"])
def test_arrays_keep_type_and_shape(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = echoed(array)
    assert found.dtype == array.dtype.newbyteorder("<")
    assert found.tolist() == array.tolist()
    assert echoed(array.T).tolist() == array.T.tolist()


def test_arrays_are_not_converted_to_the_datatype_of_the_model() -> None:
    assert input_tensor("IN", np.zeros(2), "FP32").datatype == "FP64"  # the kernel refuses it


def test_plain_values_are_converted_to_the_datatype_of_the_model() -> None:
    assert input_tensor("IN", [1, 2], "FP32").datatype == "FP32"
    assert echoed([[1, 2], [3, 4]], "UINT8").dtype == np.uint8
    assert echoed(7, "INT64").tolist() == 7
    assert (echoed([], "INT32").dtype, echoed([], "INT32").shape) == (np.int32, (0,))
    assert echoed([1.5], "FP16").dtype == np.float16
    assert echoed((True, False), "BOOL").tolist() == [True, False]


def test_strings_are_encoded_as_utf8() -> None:
    assert echoed(["ä", b"\xff", ""], "BYTES").tolist() == ["ä".encode(), b"\xff", b""]
    assert echoed(np.array(["one", "three"])).tolist() == [b"one", b"three"]


def test_bf16_is_the_upper_half_of_float32() -> None:
    values = [1.0, -2.5, float("inf"), 3.0e38]
    found = echoed(values, "BF16")
    assert found.dtype == np.float32
    assert found[:3].tolist() == values[:3]
    assert abs(found[3] - values[3]) < 3.0e38 / 128
    assert echoed(np.ones((2, 2)), "BF16").shape == (2, 2)


@pytest.mark.parametrize(
    ("value", "datatype"),
    [([1.5], "INT32"), (["x"], "FP32"), ([[1], [2, 3]], "INT32"), (["x"], "BF16"), ([None], "INT8")],
)
def test_plain_values_that_cannot_be_converted_are_refused(value: Any, datatype: str) -> None:
    with pytest.raises(InvalidArgument, match=f"input 'IN' is not an array of {datatype}: "):
        input_tensor("IN", value, datatype)


def test_arrays_without_a_datatype_of_tensors_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="input 'IN' is an array of complex128"):
        input_tensor("IN", np.zeros(1, complex), "FP32")


def test_a_small_input_is_copied() -> None:
    array = np.zeros(4, np.float32)
    tensor = input_tensor("IN", array, "FP32")
    array[:] = 1
    assert tensor.data == bytes(16)
    assert tensor.byte_size <= INLINE_LIMIT


def test_an_output_is_a_copy() -> None:
    memory = bytearray(np.arange(4, dtype=np.int32).tobytes())
    found = output_array(Tensor("OUT", "INT32", [4], memoryview(memory).toreadonly()))
    memory[:] = bytes(16)
    found += 1
    assert found.tolist() == [1, 2, 3, 4]
