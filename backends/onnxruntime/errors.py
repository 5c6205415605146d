"""Converts ONNX Runtime's exceptions to `InternalError`, with Triton's texts."""

from __future__ import annotations

import re

from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from kernel.errors import InternalError

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
