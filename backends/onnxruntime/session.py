"""Opening an ONNX Runtime session for a model instance. The only module that does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnxruntime as ort

from backends.onnxruntime.errors import ORT_ERRORS, onnx_error
from backends.onnxruntime.options import model_path, providers, session_options
from kernel.errors import Unavailable

if TYPE_CHECKING:
    from backends.base import ModelArguments


def open_session(arguments: ModelArguments) -> ort.InferenceSession:
    """Return a session on the version's model file.

    Raises `Unavailable` where there is no such file, `InternalError` with ONNX Runtime's reason where it
    cannot be loaded, and what `options` raises for a configuration that asks for the impossible.
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
    # By default a failing run would silently load the model again, for the CPU.
    session.disable_fallback()
    return session
