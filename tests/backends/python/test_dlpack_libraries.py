"""Tensors from and to the arrays of other libraries, where they are installed, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.python.tensors import Tensor

if TYPE_CHECKING:
    from backends.worker.request import OutputValue

#: Library → how an array of float32 is made of a list, the datatype of half a float, and what reads a DLPack object.
LIBRARIES = {
    "torch": ("tensor", "float32", "bfloat16", "from_dlpack"),
    "jax": ("numpy.asarray", "float32", "bfloat16", "dlpack.from_dlpack"),
    "cupy": ("asarray", "float32", "", "from_dlpack"),
}


def attribute(library: Any, path: str) -> Any:
    for name in path.split("."):
        library = getattr(library, name)
    return library


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> tuple[Any, tuple[str, str, str, str]]:
    name: str = request.param
    module = pytest.importorskip(name, reason=f"{name} is not installed")
    if name == "jax":
        pytest.importorskip("jax.dlpack")
        pytest.importorskip("jax.numpy")
    if name == "cupy" and not module.cuda.is_available():
        pytest.skip("cupy has no GPU")
    return module, LIBRARIES[name]


def output(tensor: Tensor) -> OutputValue:
    return tensor.output()


def test_an_array_of_a_library_becomes_an_output(library: tuple[Any, tuple[str, str, str, str]]) -> None:
    module, (make, float32, _, _) = library
    array = attribute(module, make)([[1.5, -2.0], [0.0, 4.0]], dtype=attribute(module, _type(module, float32)))
    found = output(Tensor.from_dlpack("OUT", array))
    assert (found.datatype, found.array.tolist()) == ("FP32", [[1.5, -2.0], [0.0, 4.0]])


def test_an_input_becomes_an_array_of_a_library_that_shares_its_memory(
    library: tuple[Any, tuple[str, str, str, str]],
) -> None:
    module, (_, _, _, read) = library
    given = np.array([1, 2, 3], np.float32)
    array = attribute(module, read)(Tensor("IN", given))
    assert [float(value) for value in array] == [1, 2, 3]
    if module.__name__ == "torch":  # the others may copy, or their arrays cannot be changed
        array[0] = 7
        assert given[0] == 7


def test_bfloat16_goes_there_and_back(library: tuple[Any, tuple[str, str, str, str]]) -> None:
    module, (make, _, bfloat16, read) = library
    if not bfloat16:
        pytest.skip(f"{module.__name__} has no bfloat16")
    array = attribute(module, make)([1.5, -2.0], dtype=attribute(module, _type(module, bfloat16)))
    tensor = Tensor.from_dlpack("OUT", array)
    assert output(tensor).datatype == "BF16"
    assert output(tensor).array.tolist() == [0x3FC0, 0xC000], "the upper halves of float32"
    back = attribute(module, read)(tensor)
    assert [float(value) for value in back] == [1.5, -2.0]
    assert "bfloat16" in str(back.dtype)


def _type(module: Any, name: str) -> str:
    return f"numpy.{name}" if module.__name__ == "jax" else name
