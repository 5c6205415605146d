"""The classification extension: an output's best classes instead of its values (Triton's classification.cc)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shm.arrays import Array

#: Larger outputs are refused, as Triton does since 2026-01.
MAX_ELEMENTS = 1_000_000

_UNSUPPORTED = ("FP16", "BF16", "BOOL", "BYTES")


def classify(array: Array, datatype: str, count: int, labels: Sequence[str], *, batched: bool) -> Array:
    """Return the `count` best classes of each row as BYTES elements `value:index[:label]`.

    The result has shape [rows, min(count, classes)], without the rows where the model does not batch.
    Raises `InvalidArgument` for datatypes that have no order here and for very large outputs.
    """
    if datatype in _UNSUPPORTED:
        raise InvalidArgument(f"class result not available for output due to unsupported type '{datatype}'")
    if array.size > MAX_ELEMENTS:
        raise InvalidArgument("classification output tensor too large")
    rows = array.reshape(array.shape[0], -1) if batched else array.reshape(1, -1)
    kept = min(count, rows.shape[1])
    best = np.argsort(-rows if rows.dtype.kind == "f" else ~rows, axis=1, kind="stable")[:, :kept]
    form = "{:f}" if array.dtype.kind == "f" else "{:d}"
    result = np.empty((rows.shape[0], kept), dtype=object)
    for row, order in enumerate(best.tolist()):
        for place, index in enumerate(order):
            text = f"{form.format(rows[row, index].item())}:{index}"
            if index < len(labels) and labels[index]:
                text += f":{labels[index]}"
            result[row, place] = text.encode()
    return result if batched else result.reshape(kept)


def read_labels(path: Path) -> list[str]:
    """Return one label per line, without the spaces around them."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
