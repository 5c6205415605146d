"""The settings of a build, and which of them the installed TensorRT supports. Pure.

Optimization profiles from the command line: the shapes of inputs that an engine is built for. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from backends.tensorrt.signature import EngineTensor, Extent, Profile, shape_text
from kernel.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    Shapes = Mapping[str, tuple[int, ...]]

#: Words of the command line → names of TensorRT's hardware compatibility levels.
COMPATIBILITY = {
    "none": "NONE",
    "ampere+": "AMPERE_PLUS",
    "same-compute-capability": "SAME_COMPUTE_CAPABILITY",
}

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

_SIZE = re.compile(r"(\d+)([kmg]?)(?:i?b)?", re.IGNORECASE)


class BuildSettings(msgspec.Struct, frozen=True):
    """How an engine is built from an ONNX file."""

    onnx_file: Path
    #: Where the plan is written.
    plan_file: Path
    #: Options of the same place make a profile: `NAME:1x3x224x224,...`.
    min_shapes: tuple[str, ...] = ()
    opt_shapes: tuple[str, ...] = ()
    max_shapes: tuple[str, ...] = ()
    fp16: bool = False
    bf16: bool = False
    strongly_typed: bool = False
    version_compatible: bool = False
    #: TensorRT's name of a level.
    hardware_compatibility: str = "NONE"
    #: In bytes; 0 for all of the device.
    workspace_byte_size: int = 0
    timing_cache: Path | None = None
    #: For TensorRT for RTX, which builds for devices that are not there.
    compute_capability: str = ""


def byte_size(text: str) -> int:
    """Return the bytes of a text such as `4G` or `512MiB`. Raises `InvalidArgument`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(f"'{text}' is not a size; write a number with K, M or G, such as 4G")
    return int(found[1]) * _UNITS[found[2].lower()]


def compatibility_level(word: str) -> str:
    """Return TensorRT's name of a hardware compatibility level. Raises `InvalidArgument`."""
    if word not in COMPATIBILITY:
        raise InvalidArgument(
            f"'{word}' is not a level of hardware compatibility; choose one of {', '.join(COMPATIBILITY)}"
        )
    return COMPATIBILITY[word]


def builder_flags(settings: BuildSettings, available: Collection[str], version: str) -> Sequence[str]:
    """Return the names of TensorRT's builder flags for the settings. `available` are those of the library.

    Raises `InvalidArgument` for settings that contradict one another, and `Unsupported` for what the library cannot do.
    """
    wanted = [name for name, given in (("FP16", settings.fp16), ("BF16", settings.bf16)) if given]
    if wanted and settings.strongly_typed:
        raise InvalidArgument(
            f"--{wanted[0].lower()} lets TensorRT choose datatypes, and --strongly-typed forbids it: give one of them"
        )
    for name in wanted:
        if name not in available:
            raise Unsupported(
                f"TensorRT {version} takes the datatypes of the ONNX model as they are, so --{name.lower()} has no "
                "meaning: convert the model before (ModelOpt AutoCast does it for FP16 and BF16), or use TensorRT 10"
            )
    if settings.version_compatible:
        wanted.append("VERSION_COMPATIBLE")
    return wanted


def parse_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Return input → shape of a text such as `image:1x3x224x224,mask:1x7`. Raises `InvalidArgument`.

    A name may contain colons; its shape begins after the last one.
    """
    found: dict[str, tuple[int, ...]] = {}
    for part in filter(None, text.split(",")):
        name, colon, dims = part.rpartition(":")
        sizes = dims.split("x")
        if not (colon and name and all(size.isascii() and size.isdigit() for size in sizes)):
            raise InvalidArgument(f"'{part}' is not a shape of an input; write NAME:1x3x224x224")
        if name in found:
            raise InvalidArgument(f"input '{name}' has two shapes in '{text}'")
        found[name] = tuple(map(int, sizes))
    return found


def profiles(settings: BuildSettings, inputs: Sequence[EngineTensor]) -> list[Profile]:
    """Return the profiles of the options, one if no input has variable dimensions.

    `inputs` are the network's. What an option leaves out is taken from another one: the minimum from the
    optimum, the optimum from the maximum, the maximum from the optimum. Raises `InvalidArgument`.
    """
    given = [
        list(map(parse_shapes, texts)) for texts in (settings.min_shapes, settings.opt_shapes, settings.max_shapes)
    ]
    count = max(map(len, given), default=0)
    if any(shapes and len(shapes) != count for shapes in given):
        raise InvalidArgument(
            "--min-shapes, --opt-shapes and --max-shapes make a profile each time they are given: give all of them "
            f"{count} times, or leave one out"
        )
    known = {tensor.name for tensor in inputs}
    for name in sorted({name for shapes in given for each in shapes for name in each} - known):
        raise InvalidArgument(f"the model has no input '{name}', its inputs are: {', '.join(sorted(known))}")
    return [
        _profile(index, [shapes[index] if shapes else {} for shapes in given], inputs) for index in range(max(count, 1))
    ]


def _profile(index: int, given: Sequence[Shapes], inputs: Iterable[EngineTensor]) -> Profile:
    low, best, high = given
    dims: dict[str, Extent] = {}
    values: dict[str, Extent] = {}
    for tensor in inputs:
        name = tensor.name
        optimum = best.get(name) or high.get(name) or low.get(name)
        if optimum is None:
            if tensor.is_dynamic or tensor.is_shape_tensor:
                raise _missing(tensor)
            dims[name] = Extent(tensor.dims, tensor.dims, tensor.dims)
            continue
        extent = Extent(low.get(name) or optimum, optimum, high.get(name) or optimum)
        if tensor.is_shape_tensor:
            values[name] = extent
            dims[name] = Extent(tensor.dims, tensor.dims, tensor.dims)
        else:
            _check(tensor, extent)
            dims[name] = extent
    return Profile(index, dims, values)


def _missing(tensor: EngineTensor) -> InvalidArgument:
    if tensor.is_shape_tensor:
        return InvalidArgument(
            f"input '{tensor.name}' is a shape tensor: say which values it has, for example "
            f"--min-shapes {tensor.name}:1x1 --opt-shapes {tensor.name}:2x2 --max-shapes {tensor.name}:8x8"
        )
    example = {size: "x".join(str(size if dim == -1 else dim) for dim in tensor.dims) for size in (1, 8)}
    return InvalidArgument(
        f"input '{tensor.name}' has variable dimensions, {shape_text(tensor.dims)}: say for which shapes to build, for "
        f"example --min-shapes {tensor.name}:{example[1]} --opt-shapes {tensor.name}:{example[8]} "
        f"--max-shapes {tensor.name}:{example[8]}"
    )


def _check(tensor: EngineTensor, extent: Extent) -> None:
    for shape in (extent.minimum, extent.optimum, extent.maximum):
        if len(shape) != len(tensor.dims) or any(
            dim not in (-1, size) for dim, size in zip(tensor.dims, shape, strict=True)
        ):
            raise InvalidArgument(
                f"shape {shape_text(shape)} does not fit input '{tensor.name}', whose shape is "
                f"{shape_text(tensor.dims)}"
            )
    ordered = zip(extent.minimum, extent.optimum, extent.maximum, strict=True)
    if not all(low <= best <= high for low, best, high in ordered):
        raise InvalidArgument(
            f"the shapes of input '{tensor.name}' must grow: minimum {shape_text(extent.minimum)}, optimum "
            f"{shape_text(extent.optimum)}, maximum {shape_text(extent.maximum)}"
        )
