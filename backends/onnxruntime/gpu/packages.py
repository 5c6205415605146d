"""The packages onnxruntime and onnxruntime-gpu, which install the same files, and the libraries of CUDA beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel.texts import install_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_REPAIR = "pip install --force-reinstall --no-deps onnxruntime-gpu"

#: For drivers before R580.
_WITH_CUDA_12 = "(with CUDA 12: the extra gpu-cuda12, and 'onnxruntime-gpu<1.27')"


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that are installed, by name."""
    from importlib.metadata import PackageNotFoundError, version  # only when an instance on a GPU cannot be loaded

    found = {}
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def advice(versions: Mapping[str, str], active: Sequence[str], cuda: str) -> str:
    """Return what to do about an onnxruntime without the provider `cuda`. Pure.

    `versions` are the installed packages, `active` the providers that it has.
    """
    if "onnxruntime-gpu" not in versions:
        return f"it is installed with: {install_command('gpu')}, then {_REPAIR} {_WITH_CUDA_12}"
    if "onnxruntime" in versions and cuda not in active:
        return (
            f"the packages onnxruntime {versions['onnxruntime']} and onnxruntime-gpu {versions['onnxruntime-gpu']} "
            f"have the same files, and those of the former were installed last. Repair: {_REPAIR}"
        )
    return (
        "the libraries of CUDA and cuDNN that onnxruntime-gpu needs must be there: "
        "pip install 'onnxruntime-gpu[cuda,cudnn]'. The log of the worker names the library that is missing"
    )


def load_cuda_libraries(ort: Any) -> None:
    """Load the libraries of the packages nvidia-*, before the first session: the system does not find them itself.

    What is missing is printed, and the session lacks the provider then.
    """
    preload = getattr(ort, "preload_dlls", None)  # since 1.21
    if preload is not None:
        preload()
