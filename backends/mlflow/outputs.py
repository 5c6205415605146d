"""The outputs of a model: named by its signature, of the datatypes of what it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernel.errors import InternalError, InvalidArgument
from shm.arrays import NUMPY_TYPES, datatype_of
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.mlflow.signature import Schema
    from backends.reshape import TensorShapes
    from shm.arrays import Array

#: The name of the one output of a model whose signature gives it none; MLServer's.
OUTPUT = "output-0"


def output_names(schema: Schema) -> list[str]:
    """Return the names of the outputs in a signature."""
    return list(schema.datatypes) or [OUTPUT]


def output_parts(configured: Sequence[str], schema: Schema, model: str, *, may_have_names: bool) -> list[str]:
    """Return the names of the parts of a result, in their order, for the outputs of a configuration.

    A result that may have names of its own can have others than the signature. Raises `InvalidArgument` for several
    outputs of which one is not in the signature.
    """
    named = output_names(schema)
    if len(named) > 1 and set(configured) <= set(named):
        return named
    if len(configured) != 1 and not may_have_names:
        raise InvalidArgument(
            f"the outputs of model '{model}' are {', '.join(configured)}; expected {', '.join(named)}, because of its "
            "file MLmodel"
        )
    return list(configured)


def divided(result: Array | dict[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """Return name → its part of a result [rows, ...]: all of it, or a column [rows, 1] for each of several names.

    Of a result with names, the parts with these names; one output is the only part, whatever its name. Raises
    `InternalError` if the result has other parts.
    """
    if isinstance(result, dict):
        return _selected(result, names)
    if len(names) == 1:
        return {names[0]: result}
    if result.ndim != 2 or result.shape[1] != len(names):
        raise InternalError(
            f"the model returns an array of shape {list(result.shape)}; expected {len(names)} columns, one for each "
            f"of its outputs: {', '.join(names)}"
        )
    return {name: result[:, [number]] for number, name in enumerate(names)}


def _selected(results: dict[str, Array], names: Sequence[str]) -> dict[str, Array]:
    if len(names) == len(results) == 1:
        return {names[0]: next(iter(results.values()))}
    missing = [name for name in names if name not in results]
    if missing:
        raise InternalError(
            f"the model returns {', '.join(results) or 'nothing'}, and not its outputs {', '.join(missing)}"
        )
    return {name: results[name] for name in names}


def outputs_of_result(
    result: Array | dict[str, Array], schema: Schema, model: str, *, batched: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the outputs of a configuration for a `result` [1, ...], and lines for the log: what the signature has
    otherwise. Raises `InvalidArgument` for a type without a datatype.
    """
    names = output_names(schema)
    lines: list[str] = []
    if isinstance(result, dict):
        if not schema.datatypes:
            names = list(result)
        elif not set(names) <= result.keys() and not len(names) == len(result) == 1:
            lines.append(
                f"model '{model}' returns {', '.join(result)}, and not the outputs {', '.join(names)} of its signature"
            )
            names = list(result)
    elif len(names) > 1 and (result.ndim != 2 or result.shape[1] != len(names)):
        lines.append(
            f"model '{model}' returns an array of shape {list(result.shape)} for a row, and not the {len(names)} "
            f"columns of its signature: its output is '{OUTPUT}'"
        )
        names = [OUTPUT]
    entries = []
    declared = schema.datatypes
    for name, array in divided(result, names).items():
        datatype = datatype_of(array)
        if datatype is None:
            raise InvalidArgument(f"output '{name}' of model '{model}' is of the type {array.dtype}")
        if declared.get(name, datatype) != datatype:
            lines.append(
                f"output '{name}' of model '{model}' is {datatype}, and not {declared[name]} as in its signature"
            )
        entries.append(_entry(name, datatype, array.shape[1:], batched=batched))
    return entries, lines


def outputs_of_schema(schema: Schema, *, batched: bool) -> list[dict[str, Any]]:
    """Return the outputs of a configuration as the signature has them; none if it has none."""
    found = [_entry(each.name, each.datatype, (1,), batched=batched) for each in schema.columns]
    found += [_entry(each.name, each.datatype, each.shape[1:] or (1,), batched=batched) for each in schema.tensors]
    return found


def _entry(name: str, datatype: str, dims: Sequence[int], *, batched: bool) -> dict[str, Any]:
    return {
        "name": name,
        "data_type": DATATYPES[datatype].config_name,
        "dims": [*([] if batched else [-1]), *dims],
    }


def empty_outputs(specs: Mapping[str, TensorShapes], names: Sequence[str]) -> dict[str, Array]:
    """Return outputs without rows."""
    found: dict[str, Array] = {}
    for name in names:
        spec = specs[name]
        shape = (0, *(1 if dim == -1 else dim for dim in spec.model_dims))
        found[name] = np.zeros(shape, object if spec.datatype == "BYTES" else NUMPY_TYPES[spec.datatype])
    return found


def as_configured(array: Array, spec: TensorShapes) -> Array:
    """Return an output [rows, ...] in the datatype of the configuration. Raises `InternalError`."""
    if spec.datatype == "BYTES":
        texts = np.empty(array.size, object)
        texts[:] = [each if isinstance(each, bytes) else str(each).encode() for each in array.reshape(-1)]
        return texts.reshape(array.shape)
    wanted = NUMPY_TYPES[spec.datatype]
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        raise InternalError(
            f"output '{spec.name}' is {array.dtype}, which cannot be {spec.datatype} as the configuration says"
        )
    found = np.ascontiguousarray(array, wanted)
    dims = spec.model_dims if spec.batched else spec.model_dims[1:]
    if not dims and found.ndim == 2 and found.shape[1] == 1:
        return found.reshape(-1)
    if not _fits(found.shape[1:], dims):
        raise InternalError(
            f"output '{spec.name}' has shape {list(found.shape)}; expected {list(dims)} for each row, as the "
            "configuration says"
        )
    return found


def _fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))
