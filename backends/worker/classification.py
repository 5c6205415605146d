"""The classification extension: an output's best classes instead of its values (Triton's classification.cc)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from backends.base import ModelArguments
    from shm.arrays import Array

#: Larger outputs are refused, as Triton does since 2026-01.
MAX_ELEMENTS = 1_000_000

_UNSUPPORTED = ("FP16", "BF16", "BOOL", "BYTES")


def classify(array: Array, datatype: str, count: int, labels: Sequence[str], *, batched: bool) -> Array:
    """Return the `count` best classes of each row as BYTES elements `value:index[:label]`.

    The result has shape [rows, min(count, classes)], or [min(count, classes)] if the model does not batch.
    Raises `InvalidArgument` for datatypes that Triton does not classify and for very large outputs.
    """
    if datatype in _UNSUPPORTED:
        raise InvalidArgument(f"class result not available for output due to unsupported type '{datatype}'")
    if array.size > MAX_ELEMENTS:
        raise InvalidArgument("classification output tensor too large")
    rows = array.reshape(array.shape[0], -1) if batched else array.reshape(1, -1)
    class_count = min(count, rows.shape[1])
    best = np.argsort(-rows if rows.dtype.kind == "f" else ~rows, axis=1, kind="stable")[:, :class_count]
    value_format = "{:f}" if array.dtype.kind == "f" else "{:d}"
    result = np.empty((rows.shape[0], class_count), dtype=object)
    for row, order in enumerate(best.tolist()):
        for rank, index in enumerate(order):
            text = f"{value_format.format(rows[row, index].item())}:{index}"
            if index < len(labels) and labels[index]:
                text += f":{labels[index]}"
            result[row, rank] = text.encode()
    return result if batched else result.reshape(class_count)


def read_labels(path: Path) -> list[str]:
    """Return the labels, one from each line, without surrounding white space."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]


def labels_of(arguments: ModelArguments) -> dict[str, list[str]]:
    """Return the labels, by output, of the outputs with a label file in the model's folder."""
    return {
        output["name"]: read_labels(arguments.model_dir / output["label_filename"])
        for output in arguments.config.get("output", [])
        if output.get("label_filename")
    }
