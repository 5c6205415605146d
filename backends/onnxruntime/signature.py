"""The signature of a model file: its inputs and outputs, with the datatypes of model configurations.

Reads from the model file which inputs and outputs have no shape, not even a rank.

ONNX Runtime describes a scalar and a tensor of any rank in the same way. The file is read without its weights, by the
wire format of protobuf: it may have gigabytes, and the package `onnx` is not needed to run models.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Set
    from pathlib import Path

    import onnxruntime as ort

#: Numbers of fields in onnx.proto.
_MODEL_GRAPH = 7

_GRAPH_INPUT, _GRAPH_OUTPUT = 11, 12

_VALUE_NAME, _VALUE_TYPE = 1, 2

_TYPE_TENSOR = 1

_TENSOR_SHAPE = 2

#: Wire types of protobuf: a number, 8 bytes, bytes after their length, 4 bytes.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _NotOnnx(ValueError):
    """The file is not an ONNX model in protobuf's format; ONNX Runtime reads another one, too."""


def tensors_of_any_rank(path: Path) -> frozenset[str]:
    """Return the names of the model's inputs and outputs whose shape the file leaves open."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return frozenset(_names(data))
        except (_NotOnnx, IndexError, UnicodeDecodeError):
            return frozenset()


def _names(data: mmap.mmap) -> Iterator[str]:
    for graph, begin, end in _fields(data, 0, len(data)):
        if graph != _MODEL_GRAPH:
            continue
        for number, value_begin, value_end in _fields(data, begin, end):
            if number in (_GRAPH_INPUT, _GRAPH_OUTPUT):
                value = {number: span for number, *span in _fields(data, value_begin, value_end)}
                if _VALUE_NAME in value and not _has_shape(data, value.get(_VALUE_TYPE, [0, 0])):
                    yield data[slice(*value[_VALUE_NAME])].decode()


def _has_shape(data: mmap.mmap, span: list[int]) -> bool:
    """Whether a TypeProto has the shape of a tensor. Values that are not tensors count as if they had one."""
    kinds = {number: inner for number, *inner in _fields(data, *span)}
    if _TYPE_TENSOR not in kinds:
        return bool(kinds)
    return any(number == _TENSOR_SHAPE for number, *_ in _fields(data, *kinds[_TYPE_TENSOR]))


def _fields(data: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field of a message, and where its bytes begin and end; numbers have no bytes."""
    while position < end:
        key, position = _varint(data, position)
        kind = key & 7
        if kind == _BYTES:
            byte_size, position = _varint(data, position)
        elif kind == _VARINT:
            byte_size, (_, position) = 0, _varint(data, position)
        elif kind in (_FIXED32, _FIXED64):
            byte_size = 4 if kind == _FIXED32 else 8
        else:
            raise _NotOnnx(kind)
        if position + byte_size > end:
            raise _NotOnnx(byte_size)
        yield key >> 3, position, position + byte_size
        position += byte_size


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    """Return a number and the position behind it."""
    value = shift = 0
    while True:
        octet = data[position]
        position += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise _NotOnnx(shift)


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
