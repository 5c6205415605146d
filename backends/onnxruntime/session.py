"""Opens an ONNX Runtime session for a model instance. No other module opens sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnxruntime as ort

from backends.onnxruntime.errors import ORT_ERRORS, onnx_error
from backends.onnxruntime.gpu.packages import advice, installed_versions, load_cuda_libraries
from backends.onnxruntime.options import model_path, session_options
from backends.onnxruntime.providers import CUDA_PROVIDER, providers
from kernel.errors import Unavailable, Unsupported

if TYPE_CHECKING:
    from backends.base import ModelArguments


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
