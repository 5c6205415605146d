"""Raw bytes as arrays: views where that is possible, and refused where they do not fit."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shm.arrays import NUMPY_TYPES, RAW_TYPES, to_array, to_bytes, to_new_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.arrays import Array


@pytest.mark.parametrize("datatype", [name for name in NUMPY_TYPES if name != "BYTES"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (6,), (2, 3), [3, 1, 2]])
def test_an_array_views_its_bytes(datatype: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    expected = np.arange(count).astype(NUMPY_TYPES[datatype]).reshape(shape)
    for raw in (expected.tobytes(), bytearray(expected.tobytes()), memoryview(bytearray(expected.tobytes()))):
        array = to_array(datatype, shape, raw)
        np.testing.assert_array_equal(array, expected, strict=True)
        assert array.flags.writeable == (not isinstance(raw, bytes))
        assert array.flags.c_contiguous
        if count and not isinstance(raw, bytes):
            raw[0] = 1
            assert array.tobytes()[0] == 1, "it is no copy"


@pytest.mark.parametrize("datatype", [name for name in NUMPY_TYPES if name != "BYTES"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (6,), (2, 3), [3, 1, 2]])
def test_a_new_array_is_a_writable_copy_of_the_same_array(datatype: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    raw = np.arange(count).astype(NUMPY_TYPES[datatype]).tobytes()
    array = to_new_array(datatype, shape, memoryview(raw))
    np.testing.assert_array_equal(array, to_array(datatype, shape, raw), strict=True)
    assert array.flags.c_contiguous
    assert array.flags.aligned
    array[...] = 1
    assert raw == np.arange(count).astype(NUMPY_TYPES[datatype]).tobytes()


@pytest.mark.parametrize("make", [to_array, to_new_array])
@pytest.mark.parametrize("shape", [[1], [3], [0], [1, 1], [2, 2]])
def test_bytes_that_are_not_those_of_the_shape_are_refused(make: Callable[..., Array], shape: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot reshape array of size 2"):
        make("FP32", shape, bytes(8))


def test_memory_is_not_unmapped_under_an_array() -> None:
    mapping = mmap.mmap(-1, 4096)
    array = to_array("FP32", [4], memoryview(mapping)[:16])
    with pytest.raises(BufferError):
        mapping.close()
    del array
    mapping.close()


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_raw_form_of_raw_types_is_what_tobytes_gives(order: str) -> None:
    for dtype in RAW_TYPES:
        array = np.asarray(np.arange(6).reshape(2, 3), dtype=dtype, order=order)  # type: ignore[call-overload]
        assert array.tobytes() == bytes(to_bytes(array))
    assert np.dtype(object) not in RAW_TYPES
    assert np.dtype(">f4") not in RAW_TYPES
