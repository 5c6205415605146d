"""Opens an ONNX Runtime session for a model instance. No other module opens sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnxruntime as ort

from backends.onnxruntime.errors import ORT_ERRORS, onnx_error
from backends.onnxruntime.options import model_path, providers, session_options
from kernel.errors import Unavailable

if TYPE_CHECKING:
    from backends.base import ModelArguments


def open_session(arguments: ModelArguments) -> ort.InferenceSession:
    """Open a session with the version's model file.

    Raises `Unavailable` if the file does not exist, `InternalError` with ONNX Runtime's reason if it cannot be loaded,
    and `InvalidArgument` or `Unsupported` for wrong settings (`options.py`).
    """
    path = model_path(arguments)
    if not path.is_file():
        raise Unavailable(f"unable to find '{path}' for model instance '{arguments.model_name}'")
    chosen = providers(arguments, ort.get_available_providers())
    try:
        session = ort.InferenceSession(
            str(path),
            session_options(arguments),
            providers=[name for name, _ in chosen],
            provider_options=[settings for _, settings in chosen],
        )
    except ORT_ERRORS as error:
        raise onnx_error(error) from error
    # By default, after a failed run ONNX Runtime silently loads the model again for the CPU.
    session.disable_fallback()
    return session
