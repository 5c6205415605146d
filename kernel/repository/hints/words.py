"""Hints for words in a configuration that do not exist: backends, datatypes, fields, platforms. Pure."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from kernel.config.autofill import FORMATS
from kernel.config.generated import model_config_pb2

if TYPE_CHECKING:
    from collections.abc import Collection

    from google.protobuf.descriptor import Descriptor

#: What people call a backend.
_MEANT = {
    "onnx": "onnxruntime",
    "onnxruntime_onnx": "onnxruntime",
    "ort": "onnxruntime",
    "libtorch": "pytorch",
    "torch": "pytorch",
    "py": "python",
    "numpy": "python",
}

#: Triton's backends for formats that can be written as ONNX, and what writes it.
_TO_ONNX = {
    "tensorflow": "tf2onnx",
    "openvino": "the framework that the model was made with",
    "tensorrt": "the framework that the model was made with",
}

#: Triton's other backends, and what to do about their models (docs/moving-from-triton.md).
_OTHER_BACKENDS = {
    "dali": "run the pipeline in a Python model, or write it as ONNX",
    "vllm": "put NVIDIA's backend into a folder and give that as --backend-directory (docs/vllm.md)",
    "tensorrtllm": "keep its models on Triton, since the backend is C++",
}

#: Other words for datatypes → that of config.pbtxt.
_DATATYPES = {
    "FLOAT": "FP32", "FLOAT32": "FP32", "DOUBLE": "FP64", "FLOAT64": "FP64", "HALF": "FP16", "FLOAT16": "FP16",
    "BFLOAT16": "BF16", "INT": "INT32", "LONG": "INT64", "BYTES": "STRING", "STR": "STRING", "BOOLEAN": "BOOL",
}  # fmt: skip

_NO_VALUE = re.compile(r'Enum type "[\w.]+\.DataType" has no value named "?(\w+)"?')
_NO_FIELD = re.compile(r'Message type "(?:[\w.]+\.)?(\w+)" has no field named "(\w+)"')


def backend_hint(name: str, backends: Collection[str]) -> str:
    """Return the hint for a backend that the server does not have; `backends` are those that it has."""
    if name in _TO_ONNX:
        return (
            f"this server has no backend '{name}'; write the model as ONNX with {_TO_ONNX[name]}, or run it in a "
            "Python model"
        )
    if name in _OTHER_BACKENDS:
        return f"this server has no backend '{name}': {_OTHER_BACKENDS[name]}"
    lower = name.lower()
    meant = _MEANT.get(lower) or next(iter(difflib.get_close_matches(lower, backends, n=1)), "")
    suggestion = f"; did you mean '{meant}'?" if meant in backends else ""
    return (
        f"this server has the backends {', '.join(sorted(backends))}; others are a backend.py beside the model or in "
        f"--backend-directory, or packages{suggestion}"
    )


def platform_hint(name: str) -> str:
    """Return the hint for a platform that does not exist."""
    backend = _MEANT.get(name.lower(), name.lower())
    known = {each.platform: each.backend for each in FORMATS}
    if backend in known.values():
        return f'write backend: "{backend}" in place of platform: "{name}"'
    return 'leave the line \'platform\' out and write backend: "onnxruntime" or backend: "python"'


def parse_hint(reason: str) -> str:
    """Return the hint for a config.pbtxt that cannot be parsed, by protobuf's text."""
    value = _NO_VALUE.search(reason)
    if value is not None:
        return _datatype_hint(value[1])
    field = _NO_FIELD.search(reason)
    if field is None:
        return ""
    names = _fields(field[1])
    begun = [name for name in names if name.startswith(f"{field[2]}_")]
    close = begun or difflib.get_close_matches(field[2], names, n=1, cutoff=0.7)
    return f"did you mean '{close[0]}'?" if close else ""


def _datatype_hint(given: str) -> str:
    known = model_config_pb2.DataType.keys()
    bare = given.upper().removeprefix("TYPE_")
    meant = f"TYPE_{_DATATYPES.get(bare, bare)}"
    if meant not in known:
        meant = next(iter(difflib.get_close_matches(meant, known, n=1, cutoff=0.8)), "")
    return f"the datatype is called {meant}" if meant else f"datatypes are {', '.join(known[1:])}"


def _fields(message: str) -> list[str]:
    """Return the names of the fields of a message of the configuration, also of one inside another."""
    for descriptor in _descriptors():
        if descriptor.name == message:
            return [field.name for field in descriptor.fields]
    return []


def _descriptors() -> list[Descriptor]:
    found: list[Descriptor] = list(model_config_pb2.DESCRIPTOR.message_types_by_name.values())
    for descriptor in found:  # grows while it is read
        found.extend(descriptor.nested_types)
    return found
