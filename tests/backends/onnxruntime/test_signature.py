from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from backends.onnxruntime.signature import tensors_of_any_rank

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends.onnxruntime.conftest import OnnxModels

FLOAT = TensorProto.FLOAT


def test_tensors_without_shape_are_told_from_scalars(models: OnnxModels) -> None:
    models.write(
        [("Neg", ["A"], ["X"]), ("Neg", ["B"], ["Y"]), ("Add", ["C", "W"], ["Z"])],
        [("A", FLOAT, None), ("B", FLOAT, []), ("C", FLOAT, ["N", 2])],
        [("X", FLOAT, None), ("Y", FLOAT, []), ("Z", FLOAT, ["N", 2])],
        {"W": np.zeros((1000, 2), np.float32)},
    )
    assert tensors_of_any_rank(models.file) == {"A", "X"}


def test_values_that_are_not_tensors_do_not_count(models: OnnxModels) -> None:
    sequence = helper.make_tensor_sequence_value_info("S", FLOAT, None)
    graph = helper.make_graph([], "model", [sequence], [])
    models.save(helper.make_model(graph))
    assert tensors_of_any_rank(models.file) == frozenset()


@pytest.mark.parametrize(
    "data", [b"ORTM\x08\x00", b"\x3a\xff\xff\xff\xff\x7f", b"\xff" * 30, b"\x3a", b"\x3a\x02\x5a\x7f"]
)
def test_a_file_that_is_no_onnx_model_says_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.ort"
    path.write_bytes(data)
    assert tensors_of_any_rank(path) == frozenset()


def test_a_cut_file_says_nothing(models: OnnxModels) -> None:
    models.write([("Neg", ["A"], ["X"])], [("A", FLOAT, None)], [("X", FLOAT, None)])
    whole = models.file.read_bytes()
    for byte_size in range(1, len(whole)):
        models.file.write_bytes(whole[:byte_size])
        assert tensors_of_any_rank(models.file) <= {"A", "X"}
    assert onnx.load_from_string(whole).graph.name == "model"
