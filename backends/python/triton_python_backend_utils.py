"""The module that models import as `triton_python_backend_utils`, usually with the name `pb_utils`.

It re-exports definitions of the modules in this folder. `install` makes it importable without the package name.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from backends.python.calls import is_model_ready, load_model, unload_model
from backends.python.failures import TritonModelException
from backends.python.instance import get_model_dir
from backends.python.logger import Logger
from backends.python.metrics import Metric, MetricFamily, TritonMetricKind
from backends.python.model_config import ModelConfig
from backends.python.requests import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
    get_input_tensor_by_name,
)
from backends.python.responses import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    ResponseSender,
    TritonError,
)
from backends.python.tensors import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceTrace",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseSender",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


#: Texts of errors and objects name the module in which Triton has these classes.
for _class in (
    InferenceRequest, InferenceResponse, InferenceTrace, Logger, MetricFamily, Metric, PreferredMemory, ResponseSender,
    Tensor, TritonError, TritonModelException,
):  # fmt: skip
    _class.__module__ = "c_python_backend_utils"


def install() -> None:
    """Make this module importable as `triton_python_backend_utils`, and what Triton has in C++ as its module for that.

    Few models import the latter, for types in annotations or for `isinstance`.
    """
    sys.modules["triton_python_backend_utils"] = sys.modules[__name__]
    if "c_python_backend_utils" not in sys.modules:
        sys.modules["c_python_backend_utils"] = _in_cpp()


def _in_cpp() -> ModuleType:
    """Return a module with the names that Triton's `c_python_backend_utils` has for models."""
    module = ModuleType("c_python_backend_utils")
    names = (
        "InferenceRequest", "InferenceResponse", "InferenceTrace", "Logger", "Metric", "MetricFamily",
        "PreferredMemory", "Tensor", "TritonError", "TritonModelException", "TRITONSERVER_MEMORY_CPU",
        "TRITONSERVER_MEMORY_GPU", "is_model_ready", "load_model", "unload_model",
    )  # fmt: skip
    module.__dict__.update({name: globals()[name] for name in names})
    module.__dict__.update(InferenceResponseSender=ResponseSender, MetricKind=TritonMetricKind)
    return module


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the response's output called `name`, or None."""
    try:
        tensors = inference_response._output_tensors  # as `get_input_tensor_by_name`: no function calls inside
    except AttributeError:  # not a response: the error names the method, as Triton's
        tensors = inference_response.output_tensors()
    for tensor in tensors:
        if tensor._name == name:
            return tensor
    return None


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the entry of the input called `name` in a model configuration, or None."""
    return next((entry for entry in model_config.get("input", ()) if entry["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the entry of the output called `name` in a model configuration, or None."""
    return next((entry for entry in model_config.get("output", ()) if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether the model is configured as decoupled."""
    policy: Mapping[str, bool] = model_config.get("model_transaction_policy", {})
    return policy.get("decoupled", False)
