"""Arrays of a program become tensors, and tensors arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernel.embedding.arrays import input_tensor, output_array
from kernel.errors import InvalidArgument
from shm.arena import INLINE_LIMIT
from shm.tensor import Tensor


def back(value: Any, datatype: str | None = None) -> Any:
    """Return what a model that gives its input back would answer."""
    tensor = input_tensor("IN", value, datatype)
    return output_array(Tensor("OUT", tensor.datatype, tensor.shape, tensor.data))


@pytest.mark.parametrize("dtype", ["bool", "u1", "i2", "<u4", "i8", "f2", "<f4", "f8", ">f4", ">i2"])
def test_arrays_keep_type_and_shape(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = back(array)
    assert found.dtype == array.dtype.newbyteorder("<")
    assert found.tolist() == array.tolist()
    assert back(array.T).tolist() == array.T.tolist()


def test_arrays_are_not_made_to_fit_the_model() -> None:
    assert input_tensor("IN", np.zeros(2), "FP32").datatype == "FP64"  # for the kernel to refuse


def test_plain_values_become_what_the_model_takes() -> None:
    assert input_tensor("IN", [1, 2], "FP32").datatype == "FP32"
    assert back([[1, 2], [3, 4]], "UINT8").dtype == np.uint8
    assert back(7, "INT64").tolist() == 7
    assert (back([], "INT32").dtype, back([], "INT32").shape) == (np.int32, (0,))
    assert back([1.5], "FP16").dtype == np.float16
    assert back((True, False), "BOOL").tolist() == [True, False]


def test_strings_are_bytes_of_utf8() -> None:
    assert back(["ä", b"\xff", ""], "BYTES").tolist() == ["ä".encode(), b"\xff", b""]
    assert back(np.array(["one", "three"])).tolist() == [b"one", b"three"]


def test_bf16_is_the_upper_half_of_float32() -> None:
    values = [1.0, -2.5, float("inf"), 3.0e38]
    found = back(values, "BF16")
    assert found.dtype == np.float32
    assert found[:3].tolist() == values[:3]
    assert abs(found[3] - values[3]) < 3.0e38 / 128
    assert back(np.ones((2, 2)), "BF16").shape == (2, 2)


@pytest.mark.parametrize(
    ("value", "datatype"),
    [([1.5], "INT32"), (["x"], "FP32"), ([[1], [2, 3]], "INT32"), (["x"], "BF16"), ([None], "INT8")],
)
def test_plain_values_that_do_not_fit_are_refused(value: Any, datatype: str) -> None:
    with pytest.raises(InvalidArgument, match=f"input 'IN' is no array of {datatype}: "):
        input_tensor("IN", value, datatype)


def test_arrays_that_no_datatype_stands_for_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="input 'IN' is an array of complex128"):
        input_tensor("IN", np.zeros(1, complex), "FP32")


def test_a_small_input_is_the_requests_own() -> None:
    array = np.zeros(4, np.float32)
    tensor = input_tensor("IN", array, "FP32")
    array[:] = 1
    assert tensor.data == bytes(16)
    assert tensor.byte_size <= INLINE_LIMIT


def test_an_output_is_the_callers_own() -> None:
    memory = bytearray(np.arange(4, dtype=np.int32).tobytes())
    found = output_array(Tensor("OUT", "INT32", [4], memoryview(memory).toreadonly()))
    memory[:] = bytes(16)
    found += 1
    assert found.tolist() == [1, 2, 3, 4]
