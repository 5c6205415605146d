"""How ONNX Runtime's bindings describe memory of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shm.arrays import NUMPY_TYPES

if TYPE_CHECKING:
    from backends.worker.devices.tensors import DeviceArray

#: onnx.TensorProto.BFLOAT16, which NumPy lacks.
_BFLOAT16 = 16


def bound_place(array: DeviceArray) -> tuple[str, int, Any, list[int], int]:
    """Return how a binding describes memory: device, its number, type of elements, shape, address."""
    element = _BFLOAT16 if array.datatype == "BF16" else NUMPY_TYPES[array.datatype].type
    return "cuda", array.device_id, element, list(array.shape), array.address
