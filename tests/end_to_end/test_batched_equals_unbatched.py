"""A request gets the same response whether it is executed alone or together with others: for every backend.

Each model is loaded twice, with and without dynamic batching. Requests that are submitted in one event-loop iteration
share batches of the first, as far as their shapes allow it.
"""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from kernel.options import DEMO_REPOSITORY
from kernel.serving.request import Request
from shm.arrays import to_array
from shm.tensor import Tensor
from tests.end_to_end.server_threads import FutureSink, server_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kernel.embedding.server import ServerThread
    from kernel.serving.kernel import Kernel

MAX_BATCH_SIZE = 6

#: Name → inputs with their fixed dimensions (None for a width that differs), and the rest of the configuration.
MODELS: dict[str, tuple[dict[str, tuple[int, ...] | None], str]] = {
    "identity": (
        {"IN": None},
        """backend: "identity"
        input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
        output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]""",
    ),
    "add_sub": (
        {"A": (16,), "B": (16,)},
        """backend: "onnxruntime"
        input [{ name: "A" data_type: TYPE_FP32 dims: [16] }, { name: "B" data_type: TYPE_FP32 dims: [16] }]
        output [{ name: "SUM" data_type: TYPE_FP32 dims: [16] }, { name: "DIFF" data_type: TYPE_FP32 dims: [16] }]""",
    ),
    "wide": (
        {"A": None},
        """backend: "onnxruntime"
        input [{ name: "A" data_type: TYPE_FP32 dims: [-1] }]
        output [{ name: "X" data_type: TYPE_FP32 dims: [-1] }]""",
    ),
    "ragged": (
        {"A": None},
        """backend: "onnxruntime"
        input [{ name: "A" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }]
        batch_input [{
            kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "WIDTHS" data_type: TYPE_INT32 source_input: "A"
        }]
        output [{ name: "X" data_type: TYPE_FP32 dims: [-1] }, {
            name: "W" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] }
        }]
        batch_output [{ target_name: "X" source_input: "A" }]""",
    ),
    "digits": (
        {"image": (8, 8)},
        """backend: "onnxruntime"
        input [{ name: "image" data_type: TYPE_FP32 dims: [8, 8] }]
        output [{ name: "scores" data_type: TYPE_FP32 dims: [10] }]""",
    ),
    "python": (
        {"IN": None, "MORE": None},
        """backend: "python"
        input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true },
               { name: "MORE" data_type: TYPE_FP32 dims: [-1] optional: true allow_ragged_batch: true }]
        output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]""",
    ),
}

ONE_INSTANCE = """instance_group [{ kind: KIND_CPU count: 1 }]
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""

PYTHON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            result = given["IN"] * 3 + given.get("MORE", 0)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", result)]))
        return responses
"""


def onnx_model(name: str) -> onnx.ModelProto | None:
    """Return the file of a model that is made here."""
    width: list[Any] = ["rows", 16 if name == "add_sub" else "width"]
    values = dict.fromkeys(("A", "B", "X", "SUM", "DIFF"), (TensorProto.FLOAT, width))
    if name == "ragged":
        values |= {tensor: (TensorProto.FLOAT, ["elements"]) for tensor in ("A", "X")}
        values |= {tensor: (TensorProto.INT32, ["rows"]) for tensor in ("WIDTHS", "W")}
    nodes = {
        "add_sub": [("Add", ["A", "B"], "SUM"), ("Sub", ["A", "B"], "DIFF")],
        "wide": [("Tanh", ["A"], "X")],
        "ragged": [("Tanh", ["A"], "X"), ("Identity", ["WIDTHS"], "W")],
    }.get(name)
    if nodes is None:
        return None
    inputs = list(dict.fromkeys(tensor for _, sources, _ in nodes for tensor in sources))
    graph = helper.make_graph(
        [helper.make_node(kind, sources, [target]) for kind, sources, target in nodes],
        name,
        [helper.make_tensor_value_info(tensor, *values[tensor]) for tensor in inputs],
        [helper.make_tensor_value_info(target, *values[target]) for _, _, target in nodes],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def write_model(folder: Path, name: str, config: str, *, batched: bool) -> None:
    model = folder / (f"{name}_batched" if batched else f"{name}_alone")
    (model / "1").mkdir(parents=True)
    batching = "dynamic_batching { }" if batched else ""
    (model / "config.pbtxt").write_text(f"max_batch_size: {MAX_BATCH_SIZE}\n{config}\n{batching}\n{ONE_INSTANCE}")
    made = onnx_model(name)
    if made is not None:
        onnx.save(made, model / "1" / "model.onnx")
    elif name == "digits":
        shutil.copy(DEMO_REPOSITORY / "digits" / "1" / "model.onnx", model / "1")
    elif name == "python":
        (model / "1" / "model.py").write_text(PYTHON)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    folder = tmp_path_factory.mktemp("models")
    for name, (_, config) in MODELS.items():
        for batched in (False, True):
            write_model(folder, name, config, batched=batched)
    with server_thread(folder, disable_auto_complete_config=True) as thread:
        yield thread


def submit(kernel: Kernel, model: str, arrays: dict[str, np.ndarray[Any, Any]]) -> FutureSink:
    sink = FutureSink()
    tensors = [Tensor(name, "FP32", list(array.shape), array.tobytes()) for name, array in arrays.items()]
    kernel.submit(Request(model, tensors, sink))
    return sink


async def outputs(sink: FutureSink) -> dict[str, list[Any]]:
    response = await sink.response
    assert response.error is None, response.error
    found = {each.name: to_array(each.datatype, each.shape, each.raw()).tolist() for each in response.outputs or ()}
    response.release()
    return found


def arrays_of(name: str, rows: int, width: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    chance = np.random.default_rng(seed)
    inputs = MODELS[name][0]
    given = [each for each in inputs if each != "MORE" or seed % 3]
    return {each: chance.random((rows, *(inputs[each] or (width,)))).astype(np.float32) for each in given}


#: Rows, width, seed. Wide tensors lie in an arena, others in the message.
requests = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 5, 1500]), st.integers(0, 2**32 - 1)), min_size=1, max_size=8
)


@pytest.mark.parametrize("name", MODELS)
def test_batched_and_unbatched_responses_are_the_same(server: ServerThread, name: str) -> None:
    counts = {"requests": 0}

    @settings(max_examples=30)
    @given(requests)
    def compare(made: Sequence[tuple[int, int, int]]) -> None:
        given = [arrays_of(name, rows, width, seed) for rows, width, seed in made]
        counts["requests"] += len(given)

        async def run() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            async with asyncio.timeout(60):
                sinks = [submit(server.kernel, f"{name}_batched", arrays) for arrays in given]
                together = [await outputs(sink) for sink in sinks]
                alone = [await outputs(submit(server.kernel, f"{name}_alone", arrays)) for arrays in given]
            return together, alone

        together, alone = server.run(run)
        for one, other in zip(together, alone, strict=True):
            assert one.keys() == other.keys()
            for output in one:
                # A matrix product of another size may be summed in another order.
                np.testing.assert_allclose(one[output], other[output], rtol=1e-5 if name == "digits" else 0)

    compare()
    executions = server.kernel.resolve(f"{name}_batched").statistics.execution_count
    assert executions < counts["requests"], "no two requests shared a batch"
