"""The commonest mistakes at the start: files and command lines. The texts beside this show what people see."""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

PYTHON_CONFIG = """\
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }]
"""

PYTHON_MODEL = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for request in requests]
"""

LFS_POINTER = """\
version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 102170
"""


class Mistake(msgspec.Struct, frozen=True):
    """A mistake: files, a command line, and a name, which is that of the file with what it shows."""

    name: str
    title: str
    #: Path → content.
    files: dict[str, str | bytes]
    #: The words behind `naiad`.
    command: str = "run models"
    #: Paths of empty folders.
    folders: tuple[str, ...] = ()
    environment: dict[str, str] = {}


@functools.cache
def onnx_model(*dims: int | str) -> bytes:
    """Return an ONNX model that adds 1 to its input of these dimensions."""
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "one"], ["y"])], "g", tensors[:1], tensors[1:], [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    found: bytes = onnx.ModelProto.SerializeToString(model)
    return found


ONNX = onnx_model("batch", 4)

MISTAKES = (
    Mistake("01-no-version-folder", "The model's file is not in a folder of a version",
            {"models/plus/config.pbtxt": 'backend: "onnxruntime"\n', "models/plus/model.onnx": ONNX}),
    Mistake("02-version-called-v1", "The folder of the version is not a number",
            {"models/plus/v1/model.onnx": ONNX}),
    Mistake("04-the-repository-is-a-file", "The repository is a file",
            {"models/notes.txt": "The models are on the other disk.\n"}, "run --model-repository=models/notes.txt"),
    Mistake("05-a-path-that-is-not-there", "The path of the repository is misspelt",
            {"models/plus/1/model.onnx": ONNX}, "run modles"),
    Mistake("06-an-empty-repository", "The repository is empty", {}, folders=("models",)),
    Mistake("07-an-onnx-file-in-the-repository", "The repository has files in place of folders",
            {"models/plus.onnx": ONNX}),
    Mistake("08-a-bucket", "The repository is in a cloud that is not known", {}, "run --model-repository=abfs://bucket/models"),
    Mistake("09-config-pbtx", "The name of config.pbtxt is misspelt",
            {"models/plus/config.pbtx": 'backend: "onnxruntime"\n', "models/plus/1/plus.onnx": ONNX}),
    Mistake("10-a-word-for-a-backend", "The backend has another name",
            {"models/plus/config.pbtxt": 'backend: "onnx"\n', "models/plus/1/model.onnx": ONNX}),
    Mistake("11-a-backend-that-is-not-there", "The model is of a framework that this server does not have",
            {"models/net/1/model.xml": b"<net/>"}),
    Mistake("12-the-name-of-the-file", "The model's file has another name than the backend looks for",
            {"models/plus/config.pbtxt": 'backend: "onnxruntime"\n', "models/plus/1/plus.onnx": ONNX}),
    Mistake("13-another-name-in-the-configuration", "The configuration has another name than the folder",
            {"models/plus/config.pbtxt": 'name: "resnet"\nbackend: "onnxruntime"\n', "models/plus/1/model.onnx": ONNX}),
    Mistake("14-a-word-for-a-datatype", "A datatype has another name",
            {"models/double/config.pbtxt": PYTHON_CONFIG.replace("TYPE_FP32", "TYPE_FLOAT"),
             "models/double/1/model.py": PYTHON_MODEL}),
    Mistake("15-a-field-that-does-not-exist", "A field of the configuration is misspelt",
            {"models/double/config.pbtxt": PYTHON_CONFIG.replace("input [", "inputs ["),
             "models/double/1/model.py": PYTHON_MODEL}),
    Mistake("16-a-gpu-where-none-is", "The configuration asks for a GPU",
            {"models/plus/config.pbtxt": 'backend: "onnxruntime"\ninstance_group [{ kind: KIND_GPU gpus: [0] }]\n',
             "models/plus/1/model.onnx": ONNX}),
    Mistake("17-a-syntax-error", "model.py has a syntax error",
            {"models/double/config.pbtxt": PYTHON_CONFIG,
             "models/double/1/model.py": PYTHON_MODEL.replace("requests):", "requests)")}),
    Mistake("18-no-class", "model.py has no class TritonPythonModel",
            {"models/double/config.pbtxt": PYTHON_CONFIG,
             "models/double/1/model.py": PYTHON_MODEL.replace("TritonPythonModel", "Double")}),
    Mistake("19-a-module-that-is-not-installed", "model.py imports what is not installed",
            {"models/double/config.pbtxt": PYTHON_CONFIG,
             "models/double/1/model.py": f"import not_installed_here\n{PYTHON_MODEL}"}),
    Mistake("20-a-pointer-of-git-lfs", "The model was cloned without Git LFS",
            {"models/plus/1/model.onnx": LFS_POINTER}),
    Mistake("21-a-file-that-is-cut", "The model was not copied to its end", {"models/plus/1/model.onnx": ONNX[:60]}),
    Mistake("22-a-fixed-batch-size", "The configuration batches, and the model has a fixed batch size",
            {"models/plus/config.pbtxt": 'backend: "onnxruntime"\nmax_batch_size: 8\n',
             "models/plus/1/model.onnx": onnx_model(1, 4)}),
    Mistake("23-the-batch-dimension-in-dims", "The dims of the configuration have the batch dimension",
            {"models/plus/config.pbtxt": """\
backend: "onnxruntime"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ -1, 4 ] }]
""", "models/plus/1/model.onnx": ONNX}),
    Mistake("24-a-model-that-is-not-there", "--load-model is misspelt", {"models/plus/1/model.onnx": ONNX},
            "run models --model-control-mode=explicit --load-model=plsu"),
    Mistake("25-one-model-in-two-repositories", "Two repositories have a model of the same name",
            {"models/plus/1/model.onnx": ONNX, "more/plus/1/model.onnx": ONNX}, "run models more"),
    Mistake("26-a-flag-that-is-misspelt", "A flag is misspelt", {}, "run --http-prot=8080"),
    Mistake("27-a-variable-that-is-wrong", "An environment variable has a wrong value", {}, "run",
            environment={"NAIAD_HTTP_PORT": "http"}),
    Mistake("28-a-command-that-is-misspelt", "A command is misspelt", {}, "rnu"),
)  # fmt: skip
