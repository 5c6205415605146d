"""Inputs for a model of which only the file is known: sizes for its variable dimensions that it accepts."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnxruntime as ort

    from shm.arrays import Array

#: What is tried for a variable dimension, but for a first one, which is the batch.
_SIZES = (1, 2, 32, 64, 576, 512, 640, 320)
#: A whole number that stands alone is often a sampling rate.
_SCALAR = 16_000

_TYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


def inputs_that_run(session: ort.InferenceSession, seed: int) -> tuple[dict[str, Array], list[Array]]:
    """Return random inputs that the model accepts, and its outputs for them. Raises `LookupError`."""
    last: Exception | None = None
    for inputs in _candidates(session, np.random.default_rng(seed)):
        try:
            return inputs, session.run(None, inputs)
        except Exception as error:  # ONNX Runtime's own, which have no common class
            last = error
    raise LookupError(f"no inputs were found that the model accepts: {last}")


def _candidates(session: ort.InferenceSession, random: np.random.Generator) -> Iterator[dict[str, Array]]:
    variable = list(
        dict.fromkeys(
            _key(node, place)
            for node in session.get_inputs()
            for place, dim in enumerate(node.shape)
            if not isinstance(dim, int) and not _is_batch(node, place)
        )
    )
    for sizes in itertools.product(_SIZES, repeat=len(variable)):
        found = dict(zip(variable, sizes, strict=True))
        shapes = {
            node.name: [
                dim if isinstance(dim, int) else found.get(_key(node, place), 1) for place, dim in enumerate(node.shape)
            ]
            for node in session.get_inputs()
        }
        yield {node.name: _array(node.type, shapes[node.name], random) for node in session.get_inputs()}


def _is_batch(node: Any, place: int) -> bool:
    return place == 0 and len(node.shape) > 1


def _key(node: Any, place: int) -> str:
    """Return what stands for a variable dimension: its name, which other tensors may have too, or else its place."""
    dim = node.shape[place]
    return dim if isinstance(dim, str) else f"{node.name}:{place}"


def _array(kind: str, shape: list[int], random: np.random.Generator) -> Array:
    dtype = _TYPES[kind]
    if np.issubdtype(dtype, np.floating):
        return random.standard_normal(shape).astype(dtype)
    if not shape:
        return np.array(_SCALAR, dtype)
    return random.integers(0, 2, shape).astype(dtype)
