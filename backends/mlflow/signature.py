"""The signature in an `MLmodel` file: columns or tensors, with the datatypes of model configurations. Pure.

Names of types and fields are those of MLflow's `mlflow.types` (`Schema`, `ColSpec`, `TensorSpec`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kernel.errors import InvalidArgument, Unsupported
from shm.arrays import datatype_of

#: MLflow's type of a column → our datatype. A `datetime` is a text as of ISO 8601.
COLUMN_TYPES = {
    "binary": "BYTES",
    "boolean": "BOOL",
    "datetime": "BYTES",
    "double": "FP64",
    "float": "FP32",
    "integer": "INT32",
    "long": "INT64",
    "string": "BYTES",
}


class Column(msgspec.Struct, frozen=True):
    """A column of a table."""

    #: The name of its tensor.
    name: str
    #: What the table calls it: MLflow keeps numbers as numbers.
    label: str | int
    #: A key of `COLUMN_TYPES`.
    kind: str
    required: bool

    @property
    def datatype(self) -> str:
        return COLUMN_TYPES[self.kind]


class SignatureTensor(msgspec.Struct, frozen=True):
    """A tensor; a first dimension of -1 is that of the batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    #: Whether the signature has this name. A model of named tensors is called with a dictionary.
    is_named: bool = False


class Schema(msgspec.Struct, frozen=True):
    """The inputs or the outputs of a signature: columns, tensors, or nothing if the signature has none."""

    columns: tuple[Column, ...] = ()
    tensors: tuple[SignatureTensor, ...] = ()

    @property
    def datatypes(self) -> dict[str, str]:
        """Name → datatype."""
        found = {each.name: each.datatype for each in self.columns}
        found.update((each.name, each.datatype) for each in self.tensors)
        return found


class ModelSignature(msgspec.Struct, frozen=True):
    """What a model takes and returns, as its author has recorded it. Nothing has checked the outputs."""

    inputs: Schema = Schema()
    outputs: Schema = Schema()
    #: Whether it has parameters of `predict`.
    has_params: bool = False


def read_signature(found: Any, model: str) -> ModelSignature:
    """Return the signature of `found`, the value of `signature` in an `MLmodel` file. Raises `ServingError`."""
    if found is None:
        return ModelSignature()
    if not isinstance(found, dict):
        raise InvalidArgument(f"the signature of model '{model}' is a {type(found).__name__}; expected a mapping")
    return ModelSignature(
        _schema(found.get("inputs"), "input", model),
        _schema(found.get("outputs"), "output", model),
        has_params=found.get("params") not in (None, "", "[]", "null"),
    )


def _schema(text: Any, kind: str, model: str) -> Schema:
    """Return a schema of its JSON; `kind` is `input` or `output`."""
    if not text:
        return Schema()
    try:
        entries = msgspec.json.decode(text, type=list[dict[str, Any]])
    except (msgspec.DecodeError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"the {kind}s in the signature of model '{model}' are no list of JSON: {error}") from None
    are_tensors = {entry.get("type") == "tensor" for entry in entries}
    if len(are_tensors) > 1:
        raise InvalidArgument(f"the {kind}s in the signature of model '{model}' are columns and tensors")
    places = [(f"the {kind} {number} in the signature of model '{model}'", entry, number)
              for number, entry in enumerate(entries)]  # fmt: skip
    if True in are_tensors:
        return Schema(tensors=tuple(_tensor(where, entry, f"{kind}-{number}") for where, entry, number in places))
    return Schema(columns=tuple(_column(where, entry, number, kind) for where, entry, number in places))


def _column(where: str, entry: dict[str, Any], number: int, kind: str) -> Column:
    label = entry.get("name")
    if label is not None and not isinstance(label, (str, int)):
        raise InvalidArgument(f"{where} has the name {label!r}; expected a text or a number")
    found = entry.get("type")
    if found not in COLUMN_TYPES:
        raise Unsupported(f"{where} is of the type '{found}'; supported are {', '.join(sorted(COLUMN_TYPES))}")
    required = bool(entry.get("required", not entry.get("optional", False)))
    if label is None:
        return Column(f"{kind}-{number}", number, found, required)
    return Column(str(label), label, found, required)


def _tensor(where: str, entry: dict[str, Any], default_name: str) -> SignatureTensor:
    try:
        spec = entry["tensor-spec"]
        shape = tuple(int(dim) for dim in spec["shape"])
        dtype = np.dtype(spec["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{where} is no tensor with a dtype and a shape: {type(error).__name__}: {error}"
        ) from None
    if any(dim < -1 for dim in shape):
        raise InvalidArgument(f"{where} has the shape {list(shape)}; a dimension is -1 or a size")
    datatype = datatype_of(np.empty(0, dtype))
    if datatype is None:
        raise Unsupported(f"{where} is of the type '{dtype}', which no datatype of the protocols is")
    name = str(entry.get("name") or "")
    return SignatureTensor(name or default_name, datatype, shape, bool(name))
