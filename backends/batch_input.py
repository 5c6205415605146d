"""Computes the inputs of a configuration's `batch_input`, which describe the parts of a ragged batch. Pure.

Clients do not send these inputs. They are computed from the shapes of the requests of a batch.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kernel.errors import BadConfig, InternalError
from shm.arrays import NUMPY_TYPES
from shm.datatypes import BY_CONFIG_NAME, element_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.worker.request import WorkerRequest
    from shm.arrays import Array

KINDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
)


class BatchInput(msgspec.Struct, frozen=True):
    """One entry of `batch_input`: the model's inputs `target_names` describe the shapes of `source_input`."""

    kind: str
    target_names: tuple[str, ...]
    datatype: str
    source_input: str


def batch_inputs_of(config: Mapping[str, Any]) -> list[BatchInput]:
    """Return the batch inputs of a model's configuration. Raises `BadConfig` for an unknown kind."""
    found = []
    for entry in config.get("batch_input", []):
        kind = str(entry.get("kind", KINDS[0]))
        if kind not in KINDS:
            raise BadConfig(f"unknown kind '{kind}' of batch input")
        datatype = BY_CONFIG_NAME[entry["data_type"]].name
        found.append(BatchInput(kind, tuple(entry["target_name"]), datatype, str(entry["source_input"][0])))
    return found


def batch_input_arrays(batch_inputs: Sequence[BatchInput], requests: Sequence[WorkerRequest]) -> dict[str, Array]:
    """Return model input → array. Raises `InternalError` if a request does not have the source input."""
    arrays = {}
    for batch_input in batch_inputs:
        shapes = [_source_shape(request, batch_input.source_input) for request in requests]
        array = _values(batch_input.kind, shapes).astype(NUMPY_TYPES[batch_input.datatype])
        arrays.update(dict.fromkeys(batch_input.target_names, array))
    return arrays


def _values(kind: str, shapes: Sequence[Sequence[int]]) -> Array:
    """Return the values of a batch input for requests whose source inputs have these `shapes`."""
    counts = [element_count(shape) for shape in shapes]
    match kind:
        case "BATCH_ELEMENT_COUNT":
            return np.array(counts)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT":
            return np.array(list(itertools.accumulate(counts)))
        case "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
            return np.array(list(itertools.accumulate(counts, initial=0)))
        case "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
            return np.zeros(max(counts))  # the model uses the shape; the elements have no meaning
        case _:
            rows = np.array([shape[1:] for shape in shapes for _ in range(shape[0])])
            return rows if kind == "BATCH_ITEM_SHAPE" else rows.reshape(-1)


def _source_shape(request: WorkerRequest, name: str) -> list[int]:
    view = request.input(name)
    if view is None:
        raise InternalError(f"input '{name}' is missing; a batch input is computed from its shape")
    return view.shape
