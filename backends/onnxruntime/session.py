"""Opens an ONNX Runtime session for a model instance. No other module opens sessions.

Converts ONNX Runtime's exceptions to `InternalError`, with Triton's texts.

The packages onnxruntime and onnxruntime-gpu, which install the same files, and the libraries of CUDA beside them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from backends.onnxruntime.options import model_path, session_options
from backends.onnxruntime.providers import CUDA_PROVIDER, providers
from kernel.errors import InternalError, Unavailable, Unsupported
from kernel.texts import install_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.base import ModelArguments

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
            f"have the same files, and the files of the former were installed last. Repair: {_REPAIR}"
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


#: All exceptions of a session. ONNX Runtime's classes have no common base class, and bindings raise RuntimeError.
ORT_ERRORS: tuple[type[Exception], ...] = (
    ort_state.EngineError,
    ort_state.EPFail,
    ort_state.Fail,
    ort_state.InvalidArgument,
    ort_state.InvalidGraph,
    ort_state.InvalidProtobuf,
    ort_state.ModelLoaded,
    ort_state.NoModel,
    ort_state.NoSuchFile,
    ort_state.NotImplemented,
    ort_state.RuntimeException,
    RuntimeError,
    ValueError,
)

_CODED = re.compile(r"\[ONNXRuntimeError\] : (?P<code>\d+) : \w+ : (?P<text>.*)", re.DOTALL)

#: The code of errors without a code, from ONNX Runtime's Python layer: ORT_FAIL.
_NO_CODE = "1"


def onnx_error(error: Exception) -> InternalError:
    """Return the error for clients and operators; `error` is one of `ORT_ERRORS`."""
    coded = _CODED.match(str(error))
    code, text = (coded["code"], coded["text"]) if coded else (_NO_CODE, str(error))
    return InternalError(f"onnx runtime error {code}: {text.strip()}")


def gpu_obstacle() -> str:
    """Return why the installed onnxruntime has no code for GPUs; "" if it has."""
    available = ort.get_available_providers()
    if CUDA_PROVIDER in available:
        return ""
    reason = advice(installed_versions(), available, CUDA_PROVIDER)
    return f"the installed onnxruntime has no {CUDA_PROVIDER}: {reason}"


def open_session(
    arguments: ModelArguments,
    stream: int = 0,
    capability: tuple[int, int] | None = None,
    *,
    graphs: bool = False,
    only_signature: bool = False,
) -> ort.InferenceSession:
    """Open a session with the version's model file; with `only_signature` quickly, and for no run.

    On a GPU it computes on the stream at this address, `capability` is the device's, and with `graphs` it captures CUDA
    graphs. Raises `Unavailable` if the
    file does not exist or ONNX Runtime cannot use the GPU, `InternalError` with ONNX Runtime's reason if it cannot be
    loaded, and `InvalidArgument` or `Unsupported` for wrong settings (`options.py`, `providers.py`).
    """
    path = model_path(arguments, capability)
    if not path.is_file():
        raise Unavailable(f"unable to find '{path}' for model instance '{arguments.model_name}'")
    available = ort.get_available_providers()
    try:
        chosen = providers(arguments, available, stream, graphs=graphs)
    except Unsupported as error:
        raise Unsupported(f"{error.message}; {advice(installed_versions(), available, CUDA_PROVIDER)}") from None
    on_gpu = any(name == CUDA_PROVIDER for name, _ in chosen)
    if on_gpu:
        load_cuda_libraries(ort)
    options = session_options(arguments)
    if only_signature:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        session = ort.InferenceSession(
            str(path),
            options,
            providers=[name for name, _ in chosen],
            provider_options=[settings for _, settings in chosen],
            enable_fallback=0,  # on the CPU, after a failed start: silently
        )
    except ORT_ERRORS as error:
        raise onnx_error(error) from error
    # By default, after a failed run ONNX Runtime silently loads the model again for the CPU.
    session.disable_fallback()
    if on_gpu and CUDA_PROVIDER not in session.get_providers():
        raise Unavailable(
            f"instance '{arguments.instance_name}' is of KIND_GPU, but ONNX Runtime cannot use CUDA and would compute "
            f"on the CPU: {advice(installed_versions(), available, CUDA_PROVIDER)}"
        )
    return session
