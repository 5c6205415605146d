"""The models that are measured, which a real Triton runs too.

Python models are files; ONNX models are written with `onnx`, with one thread each, here and in Triton's C++ backend.
"""

from __future__ import annotations

import functools
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

HEAD = "import time\n\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\n"

ADD_SUB = """class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]))
        return responses
"""

#: The same sums after 2 ms of sleep. The processor is free meanwhile, as it is while a GPU computes.
WAITING = ADD_SUB.replace("        responses = []", "        time.sleep(0.002 * len(requests))\n        responses = []")

IDENTITY = """class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy())]) for r in requests]
"""

#: Calls add_sub, which another instance executes.
CALLS = """class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="add_sub", requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=request.inputs())
            responses.append(pb_utils.InferenceResponse(call.exec().output_tensors()))
        return responses
"""

# perf_analyzer chooses the input values, so the number of responses is fixed here.
REPEAT = """ROWS = [np.array([i], np.int32) for i in range(16)]


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for row in ROWS:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", row)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

ONE_CPU = "instance_group [{ kind: KIND_CPU count: 1 }]\n"

FOUR_TENSORS = "".join(
    f'{kind} [{{ name: "{name}{number}" data_type: TYPE_FP32 dims: [16] }}]\n'
    for kind, name in (("input", "INPUT"), ("output", "OUTPUT"))
    for number in (0, 1)
)


def one_tensor(kind: str, name: str, data_type: str, dims: str) -> str:
    return f'{kind} [{{ name: "{name}" data_type: {data_type} dims: {dims} }}]\n'


PYTHON_MODELS = {
    "add_sub": ("max_batch_size: 0\n" + FOUR_TENSORS, ADD_SUB),
    "calls": ("max_batch_size: 0\n" + FOUR_TENSORS, CALLS),
    "delayed": (
        "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 500 }\n" + FOUR_TENSORS,
        ADD_SUB,
    ),
    "identity": (
        "max_batch_size: 64\ndynamic_batching { }\n"
        + one_tensor("input", "INPUT0", "TYPE_FP32", "[-1]")
        + one_tensor("output", "OUTPUT0", "TYPE_FP32", "[-1]"),
        IDENTITY,
    ),
    "repeat": (
        "max_batch_size: 0\nmodel_transaction_policy { decoupled: true }\n"
        + one_tensor("input", "IN", "TYPE_INT32", "[1]")
        + one_tensor("output", "OUT", "TYPE_INT32", "[1]"),
        REPEAT,
    ),
}


ALL_VERSIONS = "version_policy { all { } }\n"

#: Models of the rows with a light client only: `identity` for another datatype.
LIGHT_MODELS = {
    f"identity_{datatype.lower()}": (
        "max_batch_size: 64\ndynamic_batching { }\n"
        + one_tensor("input", "INPUT0", kind, "[-1]")
        + one_tensor("output", "OUTPUT0", kind, "[-1]"),
        IDENTITY,
    )
    for datatype, kind in (("INT64", "TYPE_INT64"), ("BYTES", "TYPE_STRING"))
}


#: The traffic rules of copies of `add_sub` with two versions, by the model's name. Nearly all requests go to version 2,
#: as without a rule, so that a row shows what the decision costs, and not what two workers do.
RULES = {
    "add_sub_by_weight": 'weights = { "2" = 99, "1" = 1 }\n',
    "add_sub_by_header": (
        'weights = { "1" = 1 }\n'
        '[[rules]]\nheader = "content-type"\nis = ["text/plain", "application/octet-stream"]\nto = "2"\n'
    ),
}


def chain(name: str, model: str, tensors: tuple[str, ...], data_type: str, dims: str, batch: int) -> str:
    """Return the configuration of an ensemble that executes `model` three times, each on the outputs of the one before.

    `tensors` are the numbers of the model's inputs and outputs, which are also the names of the ensemble's.
    """
    text = f'platform: "ensemble"\nmax_batch_size: {batch}\n'
    for kind, prefix in (("input", "INPUT"), ("output", "OUTPUT")):
        text += "".join(one_tensor(kind, f"{prefix}{number}", data_type, dims) for number in tensors)
    text += "ensemble_scheduling {\n"
    for source, target in (("INPUT", "first"), ("first", "second"), ("second", "OUTPUT")):
        text += f'  step {{ model_name: "{model}" model_version: -1\n'
        for number in tensors:
            text += f'    input_map {{ key: "INPUT{number}" value: "{source}{number}" }}\n'
            text += f'    output_map {{ key: "OUTPUT{number}" value: "{target}{number}" }}\n'
        text += "  }\n"
    return f'name: "{name}"\n{text}}}\n'


ENSEMBLES = {
    "pipeline": chain("pipeline", "add_sub", ("0", "1"), "TYPE_FP32", "[16]", 0),
    "pipeline_large": chain("pipeline_large", "identity", ("0",), "TYPE_FP32", "[-1]", 64),
}


def write_python_models(root: Path) -> None:
    """Write the models that both servers run into the repository `root`, and ensembles of them."""
    for name, (config, source) in PYTHON_MODELS.items():
        write_python_model(root / name, config, source)
    for name, config in ENSEMBLES.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)


def write_light_models(root: Path) -> None:
    """Write `LIGHT_MODELS`, and the models of `RULES`, into the repository `root`."""
    for name, (config, source) in LIGHT_MODELS.items():
        write_python_model(root / name, config, source)
    config, source = PYTHON_MODELS["add_sub"]
    for name, rule in RULES.items():
        write_python_model(root / name, config + ALL_VERSIONS, source)
        shutil.copytree(root / name / "1", root / name / "2")
        (root / name / "traffic.toml").write_text(rule)


def write_growing_models(root: Path, models: int, instances: Iterable[int]) -> None:
    """Write what `bench growth` loads: copies of one model, and models with each number of instances."""
    config, source = PYTHON_MODELS["add_sub"]
    for number in range(models):
        write_python_model(root / copy_name(number), config, source)
    for count in instances:
        write_python_model(root / instances_name("add_sub", count), config, source, count)
        write_python_model(root / instances_name("waiting", count), config, WAITING, count)


#: Models that return their input, and their datatypes. `spare` is for requests that load and unload it.
ECHOES = {
    "text": "TYPE_STRING", "fp32": "TYPE_FP32", "int32": "TYPE_INT32", "bool": "TYPE_BOOL", "uint8": "TYPE_UINT8",
    "spare": "TYPE_FP32",
}  # fmt: skip


def write_echoes(root: Path, *, builtin: bool) -> None:
    """Write what `bench heavy` needs: `healthy`, and models that return their input.

    These are of our identity backend if `builtin`, else Python models, which Triton can run.
    """
    config, source = PYTHON_MODELS["add_sub"]
    write_python_model(root / "healthy", config, source)
    for name, data_type in ECHOES.items():
        config = "max_batch_size: 0\n" + one_tensor("input", "INPUT0", data_type, "[-1]")
        config += one_tensor("output", "OUTPUT0", data_type, "[-1]")
        write_python_model(root / name, config, IDENTITY)
        if builtin:
            (root / name / "config.pbtxt").write_text(f'backend: "identity"\n{ONE_CPU}{config}')


def copy_name(number: int) -> str:
    """Return the name of a copy."""
    return f"add_sub_{number:02}"


def instances_name(model: str, count: int) -> str:
    """Return the name of a model with `count` instances: of `add_sub`, or of `waiting`, which sleeps."""
    return f"{model}_x{count}"


def write_python_model(folder: Path, config: str, source: str, instances: int = 1) -> None:
    """Write a Python model into a new folder; `config` and `source` as in `PYTHON_MODELS`."""
    (folder / "1").mkdir(parents=True)
    group = ONE_CPU.replace("count: 1", f"count: {instances}")
    (folder / "config.pbtxt").write_text(f'backend: "python"\n{group}{config}')
    (folder / "1" / "model.py").write_text(HEAD + source)


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
