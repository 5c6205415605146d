"""Reads the signature of an engine: one that is loaded, not one that executes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.tensorrt.signature import EngineSignature, EngineTensor, Extent, Profile

if TYPE_CHECKING:
    from collections.abc import Iterable

_LINEAR = "LINEAR"


def signature_of(engine: Any) -> EngineSignature:
    """Return the tensors and profiles of a `tensorrt.ICudaEngine`, by calls that TensorRT 10 and 11 have."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    tensors = {name: _tensor(engine, name) for name in names}
    profiles = tuple(_profile(engine, index, tensors) for index in range(max(1, engine.num_optimization_profiles)))
    return EngineSignature(tensors, profiles)


def _tensor(engine: Any, name: str) -> EngineTensor:
    tensor_format = engine.get_tensor_format(name).name
    return EngineTensor(
        name=name,
        is_input=engine.get_tensor_mode(name).name == "INPUT",
        engine_type=engine.get_tensor_dtype(name).name,
        dims=_numbers(engine.get_tensor_shape(name)),
        is_shape_tensor=bool(engine.is_shape_inference_io(name)),
        on_host=engine.get_tensor_location(name).name == "HOST",
        special_format="" if tensor_format == _LINEAR else tensor_format,
    )


def _profile(engine: Any, index: int, tensors: dict[str, EngineTensor]) -> Profile:
    dims: dict[str, Extent] = {}
    values: dict[str, Extent] = {}
    for name, tensor in tensors.items():
        if not tensor.is_input:
            continue
        if tensor.is_dynamic:
            dims[name] = Extent(*map(_numbers, engine.get_tensor_profile_shape(name, index)))
        else:
            dims[name] = Extent(tensor.dims, tensor.dims, tensor.dims)
        if tensor.is_shape_tensor and -1 not in tensor.dims:
            # TensorRT's Python package raises for a variable number of values: it cannot tell their end. The profile
            # comes first, other than the documentation's names of the arguments say.
            found = engine.get_tensor_profile_values(index, name)
            if len(found) == 3:
                values[name] = Extent(*map(_numbers, found))
    return Profile(index, dims, values)


def _numbers(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
