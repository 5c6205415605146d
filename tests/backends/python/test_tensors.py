from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.python import dlpack
from backends.python.failures import TritonModelException
from backends.python.tensors import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from shm.tensor import Tensor as InputTensor

if TYPE_CHECKING:
    from shm.arrays import Array
    from tests.backends.python.conftest import Lab

SUM = """
    def execute(self, requests):
        given = tensor(requests[0], "IN")
        given += 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)])]
"""


def bf16(values: list[float]) -> tuple[Array, InputTensor]:
    raw = (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return raw, InputTensor("IN", "BF16", [len(values)], memoryview(bytearray(raw.tobytes())))


# ---- from numpy -----------------------------------------------------------------------------


def test_a_tensor_does_not_copy_its_array() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    tensor = Tensor("A", array)
    assert tensor.as_numpy() is array
    assert (tensor.name(), tensor.shape(), tensor.is_cpu()) == ("A", [2, 3], True)
    assert triton_to_numpy_type(tensor.triton_dtype()) is np.int32
    assert tensor.output().array is array


def test_an_array_that_is_not_in_c_order_is_copied() -> None:
    array = np.arange(8).reshape(2, 4)[:, ::2]
    tensor = Tensor("A", array)
    assert tensor.as_numpy().flags.c_contiguous
    assert np.array_equal(tensor.as_numpy(), array)


def test_a_scalar_stays_a_scalar() -> None:
    assert Tensor("A", np.array(3.0)).shape() == []


def test_byte_strings_become_bytes() -> None:
    output = Tensor("A", np.array([b"a", b"bcd"])).output()
    assert (output.datatype, output.array.dtype, output.array.tolist()) == ("BYTES", object, [b"a", b"bcd"])


@pytest.mark.parametrize(
    "array", [np.zeros(2, np.complex64), np.array(["a"]), np.arange(3, dtype=">i4"), np.zeros(1, "M8[s]")]
)
def test_other_dtypes_are_refused(array: Array) -> None:
    with pytest.raises(TritonModelException, match=r"^NumPy dtype is not supported\.$"):
        Tensor("A", array)


def test_a_tensor_must_have_a_name() -> None:
    with pytest.raises(TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        Tensor("", np.zeros(1))
    with pytest.raises(TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        Tensor.from_dlpack("", np.zeros(1))


def test_a_tensor_must_have_an_array() -> None:
    with pytest.raises(TypeError) as caught:
        Tensor("a", [1, 2])  # type: ignore[arg-type]
    assert str(caught.value) == (
        "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
        "    1. Tensor(arg0: str, arg1: numpy.ndarray)\n\nInvoked with: 'a', [1, 2]"
    )


# ---- inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [True, False])
def test_an_input_in_server_memory_is_writable(lab: Lab, inline: bool) -> None:
    lab.load(SUM)
    view = lab.view("IN", np.arange(3, dtype=np.int32), inline=inline)
    assert lab.run([view]).outputs["OUT"].tolist() == [1, 2, 3]


def test_an_input_in_an_arena_is_not_copied(lab: Lab) -> None:
    view = lab.view("IN", np.arange(3, dtype=np.int32))
    tensor = Tensor.received([view], False)[0]
    tensor.as_numpy()[0] = 7
    assert view.as_numpy()[0] == 7
    assert tensor.as_numpy() is tensor.as_numpy()


def test_an_input_in_a_client_s_memory_is_read_only(lab: Lab) -> None:
    view = lab.view("IN", np.arange(3, dtype=np.int32), volatile=True)
    with pytest.raises(ValueError, match="read-only"):
        Tensor.received([view], False)[0].as_numpy()[0] = 7
    assert view.as_numpy().tolist() == [0, 1, 2]


def test_a_parameter_makes_inputs_in_a_client_s_memory_writable(lab: Lab) -> None:
    lab.load(SUM, parameters={"writable_inputs": {"string_value": "yes"}})
    view = lab.view("IN", np.arange(3, dtype=np.int32), volatile=True)
    assert lab.run([view]).outputs["OUT"].tolist() == [1, 2, 3]
    assert view.as_numpy().tolist() == [0, 1, 2]


def test_an_input_may_be_returned_unchanged(lab: Lab) -> None:
    lab.load("""
        def execute(self, requests):
            return [pb_utils.InferenceResponse(r.inputs()) for r in requests]
    """)
    assert lab.run({"OUT": np.array([b"x", b""], object)}).outputs["OUT"].tolist() == [b"x", b""]


def test_an_empty_input_is_an_empty_array(lab: Lab) -> None:
    tensor = Tensor.received([InputTensor("IN", "FP32", [0, 3], memoryview(bytearray()))], False)[0]
    assert tensor.shape() == [0, 3]
    assert tensor.as_numpy().shape == (0, 3)


# ---- BF16 -----------------------------------------------------------------------------------


def test_bf16_cannot_be_converted_to_numpy() -> None:
    tensor = Tensor.received([bf16([1.5])[1]], False)[0]
    with pytest.raises(TritonModelException) as caught:
        tensor.as_numpy()
    assert str(caught.value) == (
        "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
    )


def test_bf16_is_converted_by_dlpack() -> None:
    raw, view = bf16([1.5, -2.0])
    tensor = Tensor.from_dlpack("OUT", Tensor.received([view], False)[0].to_dlpack())
    output = tensor.output()
    assert (output.name, output.datatype, output.array.tolist()) == ("OUT", "BF16", raw.tolist())
    assert tensor.triton_dtype() == 14


# ---- DLPack ---------------------------------------------------------------------------------


class GpuTensor:
    """A tensor on a GPU, from another library."""

    def __init__(self, device_type: int) -> None:
        self._device_type = device_type

    def __dlpack__(self) -> Any:
        raise AssertionError("a capsule was asked for")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device_type, 0


def test_numpy_uses_the_memory_of_a_tensor() -> None:
    array = np.arange(4.0)
    tensor = Tensor("A", array)
    assert np.shares_memory(np.from_dlpack(tensor), array)  # type: ignore[arg-type]
    assert tensor.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("as_capsule", [True, False])
@pytest.mark.parametrize("dtype", ["?", "i8", "u1", "f2", "f4", "f8"])
def test_a_tensor_uses_the_memory_of_a_dlpack_object(dtype: str, as_capsule: bool) -> None:
    array = np.array([0, 1], dtype)
    source = Tensor("A", array)
    tensor = Tensor.from_dlpack("B", source.to_dlpack() if as_capsule else source)
    assert tensor.name() == "B"
    assert tensor.as_numpy().dtype == array.dtype
    assert np.shares_memory(tensor.as_numpy(), array)


def test_a_read_only_tensor_is_copied_for_dlpack(lab: Lab) -> None:
    view = lab.view("IN", np.arange(3, dtype=np.int32), volatile=True)
    tensor = Tensor.received([view], False)[0]
    assert np.from_dlpack(tensor).tolist() == [0, 1, 2]  # type: ignore[arg-type]
    assert not np.shares_memory(np.from_dlpack(tensor), tensor.as_numpy())  # type: ignore[arg-type]


def test_strings_cannot_be_converted_to_dlpack() -> None:
    with pytest.raises(TritonModelException, match=r"^DLPack does not have support for string tensors\.$"):
        Tensor("A", np.array([b"a"], object)).to_dlpack()


def test_dlpack_must_be_in_c_order() -> None:
    with pytest.raises(TritonModelException) as caught:
        Tensor.from_dlpack("A", np.arange(8).reshape(2, 4)[:, ::2])
    assert str(caught.value) == (
        "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
    )


@pytest.mark.parametrize("array", [np.zeros(2, np.complex64), np.zeros(2, "M8[s]")])
def test_other_dtypes_are_refused_from_dlpack(array: Array) -> None:
    with pytest.raises(TritonModelException, match=r"^DLDataType is not supported by Python backend\.$"):
        Tensor.from_dlpack("A", array)


def test_objects_without_dlpack_are_refused() -> None:
    with pytest.raises(TritonModelException, match=r"^Provided tensor is not supported\. Tensor must be"):
        Tensor.from_dlpack("A", 5)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    with pytest.raises(TritonModelException, match="is not a tensor, or it was used before"):
        Tensor.from_dlpack("A", capsule(1, b"used_dltensor", None))


def test_a_tensor_on_a_gpu_is_refused_without_using_it() -> None:
    with pytest.raises(TritonModelException, match="only tensors in CPU memory are supported"):
        Tensor.from_dlpack("A", GpuTensor(2))


def test_consumers_of_dlpack_may_ask_for_a_version_a_device_and_a_copy() -> None:
    values = np.arange(4, dtype=np.float32)
    tensor = Tensor("A", values)
    shared, _ = dlpack.from_capsule(tensor.__dlpack__(max_version=(1, 1), dl_device=(1, 0), copy=None))
    assert np.shares_memory(shared, values)
    copied, _ = dlpack.from_capsule(tensor.__dlpack__(copy=True))
    assert copied.tolist() == values.tolist()
    assert not np.shares_memory(copied, values)
    with pytest.raises(BufferError, match="tensor 'A' is in CPU memory"):
        tensor.__dlpack__(dl_device=(2, 0))


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
