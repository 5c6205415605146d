"""Best classes instead of values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.worker.outputs import classify, read_labels
from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path


def test_each_row_gives_its_best_classes_with_labels() -> None:
    scores = np.array([[0.1, 0.7, 0.2], [9, 8, 7]], np.float32)
    found = classify(scores, "FP32", 2, ["cat", "dog", ""], batched=True)
    assert found.tolist() == [[b"0.700000:1:dog", b"0.200000:2"], [b"9.000000:0:cat", b"8.000000:1:dog"]]


def test_without_batching_the_whole_output_is_one_row() -> None:
    found = classify(np.array([[1, 3], [2, -128]], np.int8), "INT8", 10, [], batched=False)
    assert found.tolist() == [b"3:1", b"2:2", b"1:0", b"-128:3"]


def test_the_first_of_equal_classes_comes_first() -> None:
    assert classify(np.array([5, 5, 9], np.uint64), "UINT64", 3, [], batched=False).tolist() == [
        b"9:2",
        b"5:0",
        b"5:1",
    ]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BOOL", "BYTES"])
def test_datatypes_without_classes_are_refused(datatype: str) -> None:
    with pytest.raises(InvalidArgument, match=f"unsupported type '{datatype}'"):
        classify(np.zeros(3, np.uint8), datatype, 1, [], batched=False)


def test_very_large_outputs_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="classification output tensor too large"):
        classify(np.zeros(1_000_001, np.uint8), "UINT8", 1, [], batched=False)


def test_labels_are_lines(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat \n dog\n\nbird")
    assert read_labels(tmp_path / "labels.txt") == ["cat", "dog", "", "bird"]
