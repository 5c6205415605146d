"""Converts arrays to DLPack capsules and back, for CPU memory only.

NumPy does the conversion. It lacks BF16, so for BF16 this module changes the type code in the capsule's header between
bfloat and unsigned integer; it changes nothing else in the structure.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.python.failures import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.arrays import Array

CPU_DEVICE = (1, 0)  # kDLCPU

#: Makes tensors of memory of a GPU, and returns None for other memory; in workers of instances on a GPU
#: (`backends/python/device_tensors.py`).
from_gpu: list[Callable[[str, Any], Any]] = []

_UINT, _BFLOAT = 1, 4  # kDLUInt, kDLBfloat


class CapsuleHeader(ctypes.Structure):
    """The first fields of DLTensor, which is the first field of DLManagedTensor (dlpack.h)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
    )


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _Exporter:
    """A capsule with the two methods that `numpy.from_dlpack` needs."""

    def __init__(self, capsule: object, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def to_capsule(array: Array, *, bfloat: bool) -> object:
    """Return a capsule of the array's memory. With `bfloat`, the array is BF16 stored as uint16.

    A read-only array is copied, because consumers of a capsule may write to its memory.
    """
    if not array.flags.writeable:
        array = array.copy()
    capsule = array.__dlpack__()
    if bfloat:
        _header(capsule).type_code = _BFLOAT
    return capsule


def from_capsule(source: Any) -> tuple[Array, bool]:
    """Return the memory of `source` as an array, without a copy, and whether it is BF16 stored as uint16.

    `source` is a capsule or has `__dlpack__`. Raises `TritonModelException` for other objects, for tensors on a GPU,
    for tensors that are not in C order, and for types that NumPy lacks.
    """
    if isinstance(source, np.ndarray):
        return _in_order(source), False
    if type(source).__name__ == "PyCapsule":
        capsule = source
    elif hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        _check_device(source.__dlpack_device__()[0])
        capsule = source.__dlpack__()
    else:
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule"
            "         or have `__dlpack__` and `__dlpack_device__` attributes"
        )
    header = _header(capsule)
    _check_device(header.device_type)
    bfloat = header.type_code == _BFLOAT and header.type_bits == 16
    if bfloat:
        header.type_code = _UINT
    try:
        # NumPy's stubs require the type of a CUDA stream, which CPU memory does not need.
        array: Array = np.from_dlpack(_Exporter(capsule, (header.device_type, header.device_id)))  # type: ignore[arg-type]  # see above
    except (BufferError, RuntimeError, TypeError) as error:
        raise TritonModelException(f"DLPack tensor cannot be read: {error}") from error
    return _in_order(array), bfloat


def _header(capsule: object) -> CapsuleHeader:
    try:
        address = _get_pointer(capsule, b"dltensor")
    except ValueError as error:
        raise TritonModelException("DLPack capsule is not a tensor, or it was used before.") from error
    return CapsuleHeader.from_address(address)


def _check_device(device_type: int) -> None:
    if device_type != CPU_DEVICE[0]:
        raise TritonModelException(
            f"DLPack tensor is on a device of type {device_type}: only tensors in CPU memory are supported, and in "
            "memory of a GPU by instances of KIND_GPU."
        )


def _in_order(array: Array) -> Array:
    if not array.flags.c_contiguous:
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    return array
