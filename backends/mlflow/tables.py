"""What a model is called with: the inputs that follow from its signature, and the table or array made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from backends.mlflow.library import pandas_library
from backends.mlflow.signature import Column
from kernel.errors import InvalidArgument, Unsupported
from shm.arrays import NUMPY_TYPES
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backends.mlflow.predictors import Predictor
    from backends.mlflow.signature import Schema
    from backends.reshape import TensorShapes
    from shm.arrays import Array

#: The parameter that says whether columns are inputs of their own, and its values.
INPUTS, BY_COLUMN, AS_ONE = "inputs", "columns", "tensor"

#: The name of the one input of a model whose signature gives it none; MLServer's.
INPUT = "input-0"


class PlannedInput(msgspec.Struct, frozen=True):
    """An input that a model has."""

    name: str
    datatype: str
    #: Without the batch dimension; empty for one value for each row.
    dims: tuple[int, ...]
    optional: bool = False

    def entry(self, *, batched: bool) -> dict[str, Any]:
        """Return it as in a configuration. Clients see [batch, 1] for one value for each row."""
        shown: dict[str, Any] = {"name": self.name, "data_type": DATATYPES[self.datatype].config_name}
        shown["dims"] = [*([] if batched else [-1]), *(self.dims or (1,))]
        if not self.dims:
            shown["reshape"] = {"shape": [] if batched else [-1]}
        if self.optional:
            shown["optional"] = True
        return shown


class InputPlan(msgspec.Struct, frozen=True):
    """The inputs of a model, and how they become what it is called with."""

    inputs: tuple[PlannedInput, ...]
    #: The columns of the table; empty for an array.
    columns: tuple[Column, ...] = ()
    #: Whether all columns are in one input.
    as_one: bool = False
    #: Whether the model is called with a DataFrame.
    makes_table: bool = False
    #: Whether the model is called with a dictionary of arrays.
    makes_dictionary: bool = False
    #: Whether the first dimension of the inputs is the number of rows.
    has_rows: bool = True

    def check(self, model: str, specs: Mapping[str, TensorShapes]) -> None:
        """Raise `InvalidArgument` if the inputs of a configuration are not these."""
        planned = {each.name: each for each in self.inputs}
        if specs.keys() != planned.keys():
            raise InvalidArgument(
                f"the inputs of model '{model}' are {', '.join(specs)}; expected {', '.join(planned)}, because of "
                "its file MLmodel"
            )
        for name, spec in specs.items():
            wanted = planned[name]
            if not can_become(spec.datatype, wanted.datatype):
                raise InvalidArgument(
                    f"input '{name}' of model '{model}' is {spec.datatype}; expected {wanted.datatype}, or what "
                    "becomes it without a loss, because of its file MLmodel"
                )
            dims = spec.model_dims if spec.batched or not self.has_rows else spec.model_dims[1:]
            per_row = not wanted.dims or (bool(self.columns) and not self.as_one)
            fits = len(dims) == len(wanted.dims) and all(
                -1 in pair or pair[0] == pair[1] for pair in zip(dims, wanted.dims, strict=True)
            )
            if not fits and not (per_row and dims in ((), (1,))):
                raise InvalidArgument(
                    f"input '{name}' of model '{model}' has dims {list(dims)} for each row; expected "
                    f"{list(wanted.dims or (1,))}, because of its file MLmodel"
                )

    def rows(self, arrays: Mapping[str, Array]) -> Any:
        """Return what the model is called with for the inputs of a batch. Raises `InvalidArgument`."""
        if self.makes_dictionary:
            return {each.name: _plain(self._whole(each, arrays[each.name])) for each in self.inputs}
        if not self.columns or self.as_one:
            [planned] = self.inputs
            array = self._whole(planned, arrays[planned.name])
            if not self.makes_table:
                return _plain(array)
            return pandas_library().DataFrame(_plain(array), columns=[each.label for each in self.columns])
        found: dict[str | int, Any] = {}
        for planned, column in zip(self.inputs, self.columns, strict=True):
            if planned.name in arrays:  # the others are optional
                found[column.label] = _values(column, self._whole(planned, arrays[planned.name]).reshape(-1))
        lengths = {len(each) for each in found.values()}
        if not lengths:
            raise InvalidArgument("the request has none of the model's columns")
        if len(lengths) > 1:
            raise InvalidArgument("the columns have different numbers of rows")
        if self.makes_table:
            return pandas_library().DataFrame(found)
        return np.column_stack(list(found.values()))

    def _whole(self, planned: PlannedInput, array: Array) -> Array:
        """Return an input in the datatype that the model takes. Raises `InvalidArgument` for a wrong shape."""
        expected = planned.dims
        if not expected and self.has_rows and array.shape[1:] == (1,):
            array = array.reshape(-1)
        shape = array.shape[1:] if self.has_rows else array.shape
        if not (self.columns and not self.as_one) and not _fits(shape, expected):
            raise InvalidArgument(
                f"input '{planned.name}' has shape {list(array.shape)}; expected {list(expected)} for each row"
            )
        return array if planned.datatype == "BYTES" else array.astype(NUMPY_TYPES[planned.datatype], copy=False)

    def example(self) -> dict[str, Array]:
        """Return one row of zeros, or of a text."""
        found = {}
        for planned in self.inputs:
            shape = [1 if dim == -1 else dim for dim in planned.dims]
            full = [1, *shape] if self.has_rows else shape
            text = b"2000-01-01" if self._is_date(planned) else b"text"
            is_text = planned.datatype == "BYTES"
            found[planned.name] = (
                np.full(full, text, object) if is_text else np.zeros(full, NUMPY_TYPES[planned.datatype])
            )
        return found

    def _is_date(self, planned: PlannedInput) -> bool:
        return any(each.name == planned.name and each.kind == "datetime" for each in self.columns)


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))


def can_become(given: str, wanted: str) -> bool:
    """Whether each value of the datatype `given` is one of `wanted`."""
    if given == wanted:
        return True
    if given not in NUMPY_TYPES or wanted not in NUMPY_TYPES:
        return False
    return np.can_cast(NUMPY_TYPES[given], NUMPY_TYPES[wanted], "safe")


def _values(column: Column, array: Array) -> Any:
    """Return the values of a column: bytes become texts or times. Raises `InvalidArgument`."""
    if array.dtype != object or column.kind == "binary":
        return array
    texts = _texts(array)
    if column.kind != "datetime":
        return texts
    pandas = pandas_library()
    try:
        return pandas.to_datetime(list(texts), format="ISO8601").to_numpy("datetime64[ns]")
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"column '{column.name}' has a text that is no time of ISO 8601: {error}") from error


def _plain(array: Array) -> Array:
    """Return an array of numbers as it is, and one of bytes as one of texts. Raises `InvalidArgument`."""
    return _texts(array) if array.dtype == object else array


def _texts(array: Array) -> Array:
    """Return an array of bytes as one of texts. Raises `InvalidArgument`."""
    try:
        flat = [each.decode() for each in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"a text is not UTF-8: {error}") from error
    found = np.empty(len(flat), object)
    found[:] = flat
    return found.reshape(array.shape)


def input_plan(model: str, schema: Schema, predictor: Predictor, choice: str) -> InputPlan:
    """Return the inputs of a model. `choice` is the parameter `inputs`, "" for none. Raises `ServingError`."""
    if choice not in ("", BY_COLUMN, AS_ONE):
        raise InvalidArgument(
            f"parameter '{INPUTS}' of model '{model}' is '{choice}'; expected {BY_COLUMN} or {AS_ONE}"
        )
    if schema.tensors:
        return _of_tensors(model, schema, predictor, choice)
    if schema.columns:
        return _of_columns(model, schema.columns, predictor, as_one=choice == AS_ONE)
    names = predictor.feature_names
    columns = tuple(Column(name, name, "double", True) for name in names)
    if choice == BY_COLUMN and not columns:
        raise InvalidArgument(
            f"model '{model}' cannot have an input for each column (parameter {INPUTS}): it has no signature, and was "
            "fitted with an array, whose columns have no names"
        )
    if columns:
        return _of_columns(model, columns, predictor, as_one=choice != BY_COLUMN)
    if not predictor.feature_count and not predictor.takes_texts:
        raise InvalidArgument(
            f"the file MLmodel of model '{model}' has no signature, from which its inputs follow. Save the model with "
            "signature=mlflow.models.infer_signature(rows, results)"
        )
    if not predictor.feature_count:
        return InputPlan((PlannedInput(INPUT, "BYTES", ()),))
    return InputPlan((PlannedInput(INPUT, "FP64", (predictor.feature_count,)),))


def _of_tensors(model: str, schema: Schema, predictor: Predictor, choice: str) -> InputPlan:
    if choice == BY_COLUMN:
        raise InvalidArgument(
            f"model '{model}' cannot have an input for each column (parameter {INPUTS}): its signature is a tensor"
        )
    if predictor.takes_dictionaries and all(each.is_named for each in schema.tensors):
        has_rows = all(each.shape[:1] == (-1,) for each in schema.tensors)
        inputs = (
            PlannedInput(each.name, each.datatype, each.shape[1:] if has_rows else each.shape)
            for each in schema.tensors
        )
        return InputPlan(tuple(inputs), makes_dictionary=True, has_rows=has_rows)
    return _of_tensor(model, schema, predictor)


def _of_tensor(model: str, schema: Schema, predictor: Predictor) -> InputPlan:
    if len(schema.tensors) != 1:
        raise Unsupported(
            f"the signature of model '{model}' has {len(schema.tensors)} tensors as inputs; models of this flavour are "
            "called with one array"
        )
    [tensor] = schema.tensors
    if not tensor.shape:
        raise Unsupported(f"the input in the signature of model '{model}' has the shape []; expected rows")
    has_rows = tensor.shape[0] == -1
    dims = tensor.shape[1:] if has_rows else tensor.shape
    count = predictor.feature_count
    if has_rows and len(dims) == 1 and count and dims[0] not in (-1, count):
        raise InvalidArgument(
            f"the signature of model '{model}' has {dims[0]} columns; expected {count}, with which the model was fitted"
        )
    if dims == (-1,) and has_rows and count:
        dims = (count,)
    return InputPlan((PlannedInput(tensor.name, tensor.datatype, dims),), has_rows=has_rows)


def _of_columns(model: str, columns: tuple[Column, ...], predictor: Predictor, *, as_one: bool) -> InputPlan:
    _check_columns(model, columns, predictor)
    table = predictor.takes_tables
    if table:
        pandas_library()
    if not as_one:
        inputs = tuple(PlannedInput(each.name, each.datatype, (1,), not each.required) for each in columns)
        return InputPlan(inputs, columns, makes_table=table)
    kinds = list(dict.fromkeys(each.kind for each in columns))
    if len(kinds) > 1:
        raise InvalidArgument(
            f"the columns of model '{model}' cannot be one input (parameter {INPUTS}): they are of the types "
            f"{', '.join(kinds)}"
        )
    if kinds[0] in ("binary", "datetime"):
        raise Unsupported(f"columns of the type '{kinds[0]}' cannot be one input (parameter {INPUTS})")
    whole = PlannedInput(INPUT, columns[0].datatype, (len(columns),))
    return InputPlan((whole,), columns, as_one=True, makes_table=table)


def _check_columns(model: str, columns: tuple[Column, ...], predictor: Predictor) -> None:
    """Raise `InvalidArgument` if the model cannot be called with these columns."""
    if not predictor.takes_tables:
        wrong = [each.name for each in columns if each.datatype == "BYTES"]
        if wrong:
            raise InvalidArgument(
                f"the columns {', '.join(wrong)} in the signature of model '{model}' are no numbers; models of this "
                "flavour are called with numbers"
            )
        if all(each.required for each in columns) and len(columns) != predictor.feature_count:
            raise InvalidArgument(
                f"the signature of model '{model}' has {len(columns)} columns; expected {predictor.feature_count}, "
                "with which the model was fitted"
            )
    names = tuple(each.name for each in columns)
    if predictor.compares_names and predictor.feature_names and names != predictor.feature_names:
        raise InvalidArgument(
            f"the columns in the signature of model '{model}' are {', '.join(names)}; expected those that it was "
            f"fitted with: {', '.join(predictor.feature_names)}"
        )
