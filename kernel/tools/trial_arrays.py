"""Inputs for trials of models, and what is wrong with their outputs. Uses NumPy, as only commands for authors do.

Outputs are compared with outputs of an equal request (`difference`), and with the model's configuration, which is what
clients are promised (`departures`): the server sends outputs as the model made them, as Triton does, so a model that
breaks its configuration serves, and its clients fail.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shm.arrays import NUMPY_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kernel.config.spec import ModelSpec, TensorSpec
    from shm.arrays import Array

#: The inputs of a request, or the outputs of a response: name → array.
Arrays = dict[str, "Array"]

#: The sizes that are tried for variable dimensions, until the model takes one.
VARIABLE_SIZES = (4, 1, 16, 64, 224)

#: The most elements of a random input.
MAX_ELEMENTS = 1 << 24

#: Integers are below this: small enough for the tokens, indices and classes that models look up.
_MAX_INTEGER = 10

_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")

#: By the size of an element in bytes: what outputs may differ by, as a part of the value, and beside it.
_TOLERANCES = {2: (2e-2, 1e-2), 4: (1e-4, 1e-5), 8: (1e-8, 1e-10)}


def random_inputs(spec: ModelSpec, variable_size: int, random: np.random.Generator) -> Arrays | None:
    """Return random inputs with one row; None if they would be too large. Floats are from 0 to 1, integers small."""
    found: Arrays = {}
    for name, tensor in spec.inputs.items():
        shape = [variable_size if dim == -1 else dim for dim in tensor.dims]
        if math.prod(shape) > MAX_ELEMENTS:
            return None
        found[name] = _random(tensor, [1, *shape] if spec.max_batch_size > 0 else shape, random)
    return found


def _random(tensor: TensorSpec, shape: Sequence[int], random: np.random.Generator) -> Array:
    if tensor.datatype == "BYTES":
        words: Array = np.empty(math.prod(shape), dtype=object)
        words[:] = [word.encode() for word in random.choice(_WORDS, words.size)]
        return words.reshape(shape)
    if tensor.datatype == "BF16":
        return random.random(shape, dtype=np.float32)
    dtype = NUMPY_TYPES[tensor.datatype]
    if dtype.kind == "f":
        return random.random(shape).astype(dtype)
    return random.integers(0, 2 if dtype.kind == "b" else _MAX_INTEGER, shape).astype(dtype)


def can_stack(rows: Sequence[Mapping[str, Array]]) -> bool:
    """Whether requests of one row each can be one request: they have the same inputs with the same shapes."""
    first = {name: array.shape for name, array in rows[0].items()}
    return all({name: array.shape for name, array in row.items()} == first for row in rows)


def stacked(rows: Sequence[Mapping[str, Array]]) -> Arrays:
    """Return the inputs of one request with these rows, in their order."""
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def row_of(outputs: Mapping[str, Array], index: int) -> Arrays:
    """Return one row of outputs, with a batch dimension of 1."""
    return {name: array[index : index + 1] for name, array in outputs.items()}


class OutputDifference(msgspec.Struct, frozen=True):
    """How two results of the same request differ."""

    text: str
    #: Whether it is no more than rounding.
    rounding: bool = False


def difference(expected: Mapping[str, Array], found: Mapping[str, Array]) -> OutputDifference | None:
    """Return the worst difference between two sets of outputs; None if they are the same."""
    if expected.keys() != found.keys():
        return OutputDifference(f"outputs {', '.join(sorted(found))} instead of {', '.join(sorted(expected))}")
    worst: OutputDifference | None = None
    for name, array in expected.items():
        other = _difference(name, array, found[name])
        if other is not None and (worst is None or worst.rounding):
            worst = other
    return worst


def _difference(name: str, expected: Array, found: Array) -> OutputDifference | None:
    if expected.shape != found.shape:
        return OutputDifference(f"output '{name}' has shape {list(found.shape)} instead of {list(expected.shape)}")
    if expected.dtype.kind != "f":
        count = int(np.count_nonzero(expected != found))
        return OutputDifference(f"output '{name}' differs in {count} of {found.size} elements") if count else None
    if np.array_equal(expected, found, equal_nan=True):
        return None
    relative, absolute = _TOLERANCES[expected.dtype.itemsize]
    with np.errstate(invalid="ignore"):
        largest = float(np.nanmax(np.abs(expected.astype(np.float64) - found.astype(np.float64)), initial=0))
    rounding = bool(np.allclose(found, expected, rtol=relative, atol=absolute, equal_nan=True))
    return OutputDifference(f"output '{name}' differs by up to {largest:.3g}", rounding)


#: Backends that leave dimensions of 1 out of their outputs' shapes, as Triton's do.
_WITHOUT_ONES = ("fil",)


class SentOutput(msgspec.Struct, frozen=True):
    """An output of a response, as the client would get it."""

    name: str
    datatype: str
    shape: list[int]


def departures(spec: ModelSpec, responses: Iterable[Iterable[SentOutput]]) -> list[str]:
    """Return a line for each output in which the responses depart from the configuration.

    A model may leave an output out of a response; one that no response has departs. `responses` are those to requests
    that named no outputs.
    """
    seen: set[str] = set()
    lines: dict[str, str] = {}
    for response in responses:
        for output in response:
            seen.add(output.name)
            expected = spec.outputs.get(output.name)
            if expected is not None and spec.backend in _WITHOUT_ONES:
                expected = _without_ones(expected)
            line = _departure(output, expected) if expected is not None else _unknown(output.name, spec)
            if line:
                lines.setdefault(output.name, line)
    for name in spec.outputs:
        if name not in seen:
            lines[name] = (
                f"output '{name}' is in the configuration, but no response has it: correct the name in the "
                "model, or in config.pbtxt"
            )
    return list(lines.values())


def _without_ones(expected: TensorSpec) -> TensorSpec:
    batch, dims = expected.shape[: len(expected.shape) - len(expected.dims)], expected.dims
    return msgspec.structs.replace(expected, shape=(*batch, *(dim for dim in dims if dim != 1)))


def _departure(output: SentOutput, expected: TensorSpec) -> str:
    if output.datatype != expected.datatype:
        return (
            f"output '{output.name}' is {output.datatype}, but the configuration says {expected.datatype}: change the "
            "model, or data_type in config.pbtxt"
        )
    shape = expected.shape
    fits = len(shape) == len(output.shape) and all(
        dim in (-1, size) for dim, size in zip(shape, output.shape, strict=False)
    )
    if not fits and expected.reshape is None and not expected.is_shape_tensor:
        return (
            f"output '{output.name}' has shape {output.shape}, but the configuration says {list(shape)}: change the "
            "model, or dims in config.pbtxt"
        )
    return ""


def _unknown(name: str, spec: ModelSpec) -> str:
    there = ", ".join(f"'{each}'" for each in spec.outputs) or "none"
    return f"output '{name}' is not in the configuration, which has {there}"
