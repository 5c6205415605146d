"""ONNX models of a few nodes, in a temporary model repository."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import pytest
from onnx import helper, numpy_helper

from backends.base import ModelArguments
from backends.onnxruntime.backend import OnnxRuntimeBackend

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shm.arrays import Array
    from tests.backends.conftest import Lab

    #: Name, onnx.TensorProto type and dimensions; None leaves the rank open.
    Value = tuple[str, int, Sequence[int | str | None] | None]
    Node = tuple[str, Sequence[str], Sequence[str]]


class OnnxModels:
    """Writes and loads a model called `model`."""

    def __init__(self, root: Path, lab: Lab) -> None:
        self.dir = root / "model"
        self.file = self.dir / "1" / "model.onnx"
        self.file.parent.mkdir(parents=True)
        self._lab = lab

    def write(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        constants: dict[str, Array] | None = None,
    ) -> None:
        graph = helper.make_graph(
            [helper.make_node(kind, list(sources), list(targets)) for kind, sources, targets in nodes],
            "model",
            [helper.make_tensor_value_info(*value) for value in inputs],
            [helper.make_tensor_value_info(*value) for value in outputs],
            [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
        )
        self.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))

    def save(self, model: onnx.ModelProto) -> None:
        onnx.save(model, self.file)

    def write_unary(
        self, kind: str, element: int, dims: Sequence[int | str | None], out_dims: Sequence[int | str | None]
    ) -> None:
        """Write a model with one node, from input `A` to output `X`."""
        self.write([(kind, ["A"], ["X"])], [("A", element, dims)], [("X", element, out_dims)])

    def arguments(self, config: dict[str, Any] | None = None, **more: Any) -> ModelArguments:
        return ModelArguments({"name": "model", **(config or {})}, self.dir, 1, **more)

    def completed(self, config: dict[str, Any] | None = None) -> dict[str, Any]:
        return OnnxRuntimeBackend(self._lab).complete(self.arguments(config))

    def loaded(self, config: dict[str, Any] | None = None) -> OnnxRuntimeBackend:
        """Complete `config`, load the model, and return its backend."""
        backend = OnnxRuntimeBackend(self._lab)
        backend.load(self.arguments(backend.complete(self.arguments(config))))
        return backend


@pytest.fixture
def models(tmp_path: Path, lab: Lab) -> OnnxModels:
    return OnnxModels(tmp_path, lab)
