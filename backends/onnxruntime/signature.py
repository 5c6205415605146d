"""The signature of a model file: its inputs and outputs, with the datatypes of model configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backends.onnxruntime.model_file import tensors_of_any_rank
from kernel.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set
    from pathlib import Path

    import onnxruntime as ort

#: ONNX Runtime's name of a tensor type → our datatype, and its name in Triton's error texts.
_DATATYPES = {
    "tensor(bool)": ("BOOL", "BOOL"),
    "tensor(uint8)": ("UINT8", "UINT8"),
    "tensor(uint16)": ("UINT16", "UINT16"),
    "tensor(uint32)": ("UINT32", "UINT32"),
    "tensor(uint64)": ("UINT64", "UINT64"),
    "tensor(int8)": ("INT8", "INT8"),
    "tensor(int16)": ("INT16", "INT16"),
    "tensor(int32)": ("INT32", "INT32"),
    "tensor(int64)": ("INT64", "INT64"),
    "tensor(float16)": ("FP16", "FLOAT16"),
    "tensor(float)": ("FP32", "FLOAT"),
    "tensor(double)": ("FP64", "DOUBLE"),
    "tensor(string)": ("BYTES", "STRING"),
    "tensor(bfloat16)": ("BF16", "BFLOAT16"),
}

_ZIPMAP = "A classifier of scikit-learn returns a tensor if it is converted with the option zipmap=False."

#: The word before the parenthesis, of types that are not tensors → the name in Triton's error texts.
_VALUE_TYPES = {
    "seq": "ONNX_TYPE_SEQUENCE",
    "map": "ONNX_TYPE_MAP",
    "sparse_tensor": "ONNX_TYPE_SPARSETENSOR",
}


class OnnxTensor(msgspec.Struct, frozen=True):
    """One input or output of a model file."""

    name: str
    #: Protocol name; None for types that no client can send, such as complex numbers.
    datatype: str | None
    #: -1 for a variable dimension. Empty for scalars and for tensors of any rank.
    dims: tuple[int, ...]
    #: The file leaves the number of dimensions open.
    any_rank: bool = False
    #: ONNX Runtime's name of the type.
    onnx_type: str = ""
    #: The name of the type in Triton's error texts.
    onnx_name: str = "UNDEFINED"


class OnnxSignature(msgspec.Struct, frozen=True):
    """All tensors of a model file: name → tensor, in the order of the file.

    `initializers` are constants that a request may replace. They are the model's optional inputs.
    """

    inputs: dict[str, OnnxTensor]
    outputs: dict[str, OnnxTensor]
    initializers: dict[str, OnnxTensor] = {}
    #: Outputs that are no tensors, beside others that are: name → ONNX Runtime's type. Nobody can ask for them.
    left_out: dict[str, str] = {}

    @property
    def uses_strings(self) -> bool:
        return any(tensor.datatype == "BYTES" for tensor in (*self.inputs.values(), *self.outputs.values()))


def signature_of(session: ort.InferenceSession, path: Path) -> OnnxSignature:
    """Return the signature of the session's model, whose file is `path`.

    Raises `Unsupported` for inputs that are not tensors, and for outputs if none is a tensor. Outputs that are not are
    left out beside others: a classifier that skl2onnx has converted has its probabilities as a sequence of maps.
    """
    inputs, outputs = session.get_inputs(), session.get_outputs()
    left_out: dict[str, str] = {}
    if any(_is_tensor(node.type) for node in outputs):
        left_out = {node.name: node.type for node in outputs if not _is_tensor(node.type)}
        outputs = [node for node in outputs if node.name not in left_out]
    no_shape = any(node.type.startswith("tensor") and not node.shape for node in (*inputs, *outputs))
    any_rank = tensors_of_any_rank(path) if no_shape else frozenset()
    return OnnxSignature(
        inputs=_tensors(inputs, any_rank),
        outputs=_tensors(outputs, any_rank),
        initializers=_tensors(session.get_overridable_initializers(), frozenset()),
        left_out=left_out,
    )


def left_out_text(left_out: Mapping[str, str]) -> str:
    """Return a line for the log about outputs that are not served; empty if there are none."""
    if not left_out:
        return ""
    shown = ", ".join(f"'{name}' ({onnx_type})" for name, onnx_type in left_out.items())
    plural = "outputs that are no tensors are" if len(left_out) > 1 else "an output that is no tensor is"
    text = f"{plural} left out: {shown}."
    if any(onnx_type.startswith("seq(map(") for onnx_type in left_out.values()):
        text += " " + _ZIPMAP
    return text


def _is_tensor(onnx_type: str) -> bool:
    return onnx_type.partition("(")[0] == "tensor"


def _tensors(nodes: Iterable[ort.NodeArg], any_rank: Set[str]) -> dict[str, OnnxTensor]:
    return {
        node.name: tensor_of(node.name, node.type, node.shape, any_rank=not node.shape and node.name in any_rank)
        for node in nodes
    }


def tensor_of(name: str, onnx_type: str, shape: Iterable[int | str | None], *, any_rank: bool = False) -> OnnxTensor:
    """Return a tensor from ONNX Runtime's description. Named and unknown dimensions are variable."""
    word = onnx_type.partition("(")[0]
    if word != "tensor":
        found = _VALUE_TYPES.get(word, "ONNX_TYPE_UNKNOWN")
        text = f"Unsupported ONNX Type '{found}' for I/O '{name}', expected 'ONNX_TYPE_TENSOR'."
        if onnx_type.startswith("seq(map("):
            text += " " + _ZIPMAP
        raise Unsupported(text)
    datatype, onnx_name = _DATATYPES.get(onnx_type, (None, "UNDEFINED"))
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in shape)
    return OnnxTensor(name, datatype, dims, any_rank, onnx_type, onnx_name)
