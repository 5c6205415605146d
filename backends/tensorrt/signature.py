"""The signature of an engine: its tensors, and the shapes that its optimization profiles support. Pure.

`plans/engine_signature.py` reads it from an engine.

Reads the signature of an engine: one that is loaded, not one that executes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: TensorRT's name of a datatype → ours. The others have no datatype in the protocols: FP8, FP4, INT4 and E8M0 are for
#: weights and tensors inside an engine.
DATATYPES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT64": "INT64",
    "INT32": "INT32",
    "INT8": "INT8",
    "UINT8": "UINT8",
    "BOOL": "BOOL",
}


class EngineTensor(msgspec.Struct, frozen=True):
    """One input or output of an engine."""

    name: str
    is_input: bool
    #: TensorRT's name, such as `HALF`.
    engine_type: str
    #: With the batch dimension; -1 for a variable dimension.
    dims: tuple[int, ...]
    #: Its values are needed to compute shapes (TensorRT: shape inference I/O).
    is_shape_tensor: bool = False
    #: Its memory is on the host.
    on_host: bool = False
    #: TensorRT's name of the memory format, where elements are not in row-major order; empty otherwise.
    special_format: str = ""

    @property
    def datatype(self) -> str:
        """The protocol name. Raises `Unsupported` for types that no client can send."""
        found = DATATYPES.get(self.engine_type)
        if found is None:
            raise Unsupported(
                f"{'input' if self.is_input else 'output'} '{self.name}' of the engine has the TensorRT type "
                f"{self.engine_type}, which the inference protocols do not have; build the engine with inputs and "
                "outputs of FP32, FP16, BF16 or an integer type (a cast or a Q/DQ pair at the border of the network)"
            )
        return found

    @property
    def kind(self) -> str:
        """The word for it in error texts."""
        return "input" if self.is_input else "output"

    @property
    def is_dynamic(self) -> bool:
        return -1 in self.dims


class Extent(msgspec.Struct, frozen=True):
    """What a profile supports for one input: dimensions, or values of a shape tensor."""

    minimum: tuple[int, ...]
    optimum: tuple[int, ...]
    maximum: tuple[int, ...]


class Profile(msgspec.Struct, frozen=True):
    """An optimization profile of an engine."""

    index: int
    #: Input → its dimensions, with the batch dimension.
    dims: dict[str, Extent]
    #: Shape tensor → its values, where the engine says which they may be.
    values: dict[str, Extent] = {}


class EngineSignature(msgspec.Struct, frozen=True):
    """All tensors of an engine, in its order, and its profiles. An engine has at least one profile."""

    tensors: dict[str, EngineTensor]
    profiles: tuple[Profile, ...]

    @property
    def inputs(self) -> dict[str, EngineTensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor.is_input}

    @property
    def outputs(self) -> dict[str, EngineTensor]:
        return {name: tensor for name, tensor in self.tensors.items() if not tensor.is_input}

    @property
    def has_shape_tensors(self) -> bool:
        return any(tensor.is_shape_tensor for tensor in self.tensors.values())


def shape_text(dims: Sequence[int]) -> str:
    """Return a shape as Triton writes it: `[-1,3,224,224]`."""
    return "[" + ",".join(map(str, dims)) + "]"


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
