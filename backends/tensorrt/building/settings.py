"""The settings of a build, and which of them the installed TensorRT supports. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

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
