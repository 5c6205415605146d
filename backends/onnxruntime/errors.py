"""ONNX Runtime's exceptions as `InternalError`, in the form in which Triton tells them to clients."""

from __future__ import annotations

import re

from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from kernel.errors import InternalError

#: All that a session raises: its own classes have no common base, and bindings raise RuntimeError.
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

#: ORT_FAIL, for errors of the Python layer that carry no code.
_NO_CODE = "1"


def onnx_error(error: Exception) -> InternalError:
    """Return `error`, one of `ORT_ERRORS`, as clients and operators read it."""
    coded = _CODED.match(str(error))
    code, text = (coded["code"], coded["text"]) if coded else (_NO_CODE, str(error))
    return InternalError(f"onnx runtime error {code}: {text.strip()}")
