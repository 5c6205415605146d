"""ONNX models that are measured: with one thread each, here and in Triton's C++ backend. Written with `onnx`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.models import FOUR_TENSORS, ONE_CPU, one_tensor

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MLP_LAYERS, MLP_WIDTH = 6, 1024

_THREADS = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'


def write_onnx_models(root: Path) -> None:
    """Write `add_sub_onnx`, `identity_onnx` (any number of floats) and `mlp_onnx` (batches of 16) into `root`."""
    from onnx import helper, numpy_helper

    sums = [helper.make_node(kind, ["INPUT0", "INPUT1"], [output])
            for kind, output in (("Add", "OUTPUT0"), ("Sub", "OUTPUT1"))]  # fmt: skip
    tensors = {name: [16] for name in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")}
    _write(root / "add_sub_onnx", sums, tensors, "max_batch_size: 0\n" + FOUR_TENSORS)

    same = [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])]
    batches: dict[str, list[int | str]] = {"INPUT0": ["batch", "count"], "OUTPUT0": ["batch", "count"]}
    _write(root / "identity_onnx", same, batches, "max_batch_size: 64\ndynamic_batching { }\n" + _one_tensor("[-1]"))

    layers, weights = [], []
    source = "INPUT0"
    for number, weight in enumerate(mlp_weights()):
        last = number == MLP_LAYERS - 1
        weights.append(numpy_helper.from_array(weight, f"W{number}"))
        layers.append(helper.make_node("MatMul", [source, f"W{number}"], ["OUTPUT0" if last else f"M{number}"]))
        if not last:
            layers.append(helper.make_node("Relu", [f"M{number}"], [f"R{number}"]))
        source = f"R{number}"
    rows: dict[str, list[int | str]] = {name: ["batch", MLP_WIDTH] for name in ("INPUT0", "OUTPUT0")}
    config = "max_batch_size: 16\ndynamic_batching { }\n" + _one_tensor(f"[{MLP_WIDTH}]")
    _write(root / "mlp_onnx", layers, rows, config, weights)


def _one_tensor(dims: str) -> str:
    return one_tensor("input", "INPUT0", "TYPE_FP32", dims) + one_tensor("output", "OUTPUT0", "TYPE_FP32", dims)


def _write(folder: Path, nodes: list[Any], tensors: dict[str, Any], config: str, weights: Any = ()) -> None:
    """Write one model; `tensors` are the shapes of its inputs and outputs by name."""
    import onnx
    from onnx import TensorProto, helper

    values = {
        kind: [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
               for name, shape in tensors.items() if name.startswith(kind)]
        for kind in ("INPUT", "OUTPUT")
    }  # fmt: skip
    graph = helper.make_graph(nodes, folder.name, values["INPUT"], values["OUTPUT"], initializer=list(weights))
    (folder / "1").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{ONE_CPU}{_THREADS}{config}')


@functools.cache
def mlp_weights() -> list[NDArray[np.float32]]:
    """Return the weights of each layer, of which the signal neither grows nor vanishes."""
    generator = np.random.default_rng(0)
    shape, scale = (MLP_WIDTH, MLP_WIDTH), (2 / MLP_WIDTH) ** 0.5
    return [(generator.standard_normal(shape) * scale).astype(np.float32) for _ in range(MLP_LAYERS)]


def mlp_output(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what `mlp_onnx` calculates, but for the order of its sums."""
    for weight in mlp_weights()[:-1]:
        rows = np.maximum(rows @ weight, 0)
    return rows @ mlp_weights()[-1]
