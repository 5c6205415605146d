"""Hints for models that cannot be loaded. Whole servers show them in tests/end_to_end/mistakes."""

from __future__ import annotations

import pytest

from kernel.repository.layout import Entry, model_folder
from kernel.repository.load_hints import Failure, load_hint

BACKENDS = ("identity", "onnxruntime", "python")
NO_VERSION = "at least one version must be available under the version policy of model 'm'"
NO_BACKEND = "Invalid model name: Could not determine backend for model 'm' with no backend in model configuration."
CUT = "onnx runtime error 7: Load model from /srv/m/1/model.onnx failed:Protobuf parsing failed."


def folder(name: str, *children: Entry) -> Entry:
    return Entry(name, is_folder=True, children=children)


def hint(text: str, *children: Entry, name: str = "m", first_bytes: bytes = b"") -> str:
    model = model_folder("/srv", folder(name, *children))
    return load_hint(Failure(model, text, BACKENDS, lambda path: first_bytes))


@pytest.mark.parametrize(
    ("text", "children", "said"),
    [
        (NO_VERSION, [Entry("model.onnx")], "put it into a folder of a version, '/srv/m/1/model.onnx'"),
        (NO_VERSION, [folder("v1", Entry("model.py"))], "rename 'v1' to '1'"),
        (NO_BACKEND, [folder("a", Entry("config.pbtxt"), folder("1", Entry("model.py"))), folder("b", folder("1"))],
         "it is a folder of models, with 'a' and others: give it as a repository of its own"),
        (NO_VERSION, [], "put its files into '/srv/m/1'"),
        (NO_VERSION, [folder("1"), folder("3")], "the model has versions 1, 3, and the version_policy"),
        (NO_VERSION, [folder("1")], "the model has version 1, and the version_policy"),
        (NO_BACKEND, [], "put its files into '/srv/m/1'"),
        (NO_BACKEND, [Entry("config.pbtx"), folder("1")], "rename 'config.pbtx'"),
        (NO_BACKEND, [Entry("Config.pbtxt"), folder("1")], "rename 'Config.pbtxt'"),
        (NO_BACKEND, [folder("1")], "'/srv/m/1' is empty"),
        (NO_BACKEND, [folder("1", Entry("net.onnx"))], "has 'net.onnx': rename it to 'model.onnx'"),
        (NO_BACKEND, [folder("1", Entry("notes.txt"))], "has only 'notes.txt', and no file of a model"),
        ("unable to find '/srv/m/2/model.onnx' for model instance 'm'",
         [folder("1", Entry("model.onnx")), folder("2", Entry("net.onnx"))], "'/srv/m/2' has 'net.onnx'"),
        ("model configuration is not provided for model 'm'", [folder("1", Entry("model.plan"))],
         "'model.plan' is an engine of TensorRT, which is read and executed only on a GPU"),
        ("unable to load model 'm', TensorRT backend supports only GPU device", [folder("1", Entry("b.plan"))],
         "'b.plan' is an engine of TensorRT"),
        ("Python model file not found in '/srv/m/1/model.py'", [folder("1", Entry("net.onnx"))],
         "has only 'net.onnx', and no model.py"),
    ],
)  # fmt: skip
def test_what_is_in_the_folder_says_what_is_wrong(text: str, children: list[Entry], said: str) -> None:
    assert said in hint(text, *children)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("unable to find backend library for backend 'onnx', try", "did you mean 'onnxruntime'?"),
        ("unable to find backend library for backend 'Pyton', try", "did you mean 'python'?"),
        ("unable to find backend library for backend 'zzz', try", "identity, onnxruntime, python; others are"),
        ("unable to find backend library for backend 'tensorflow', try", "write the model as ONNX with tf2onnx"),
        ("unable to find backend library for backend 'dali', try", "run the pipeline in a Python model"),
        ("unable to find backend library for backend 'vllm', try", "give that as --backend-directory (docs/vllm.md)"),
        ("unable to find backend library for backend 'tensorrtllm', try", "keep its models on Triton"),
        ("unexpected platform type 'onnx' for m", 'backend: "onnxruntime"'),
        ("unexpected platform type 'zzz' for m", "leave the line 'platform' out"),
        ("unexpected directory name 'm' for model 'n', directory name must equal model name", 'says name: "n"'),
        ("instance group m_0 of model m has kind KIND_GPU but no GPUs are available", "kind: KIND_CPU"),
        ("instance group m_0 of model m specifies invalid or unsupported gpu id 0. GPUs with at least the minimum "
         "required CUDA compute compatibility of 6.000000 are: ;\n", "kind: KIND_CPU"),
        ("ModuleNotFoundError: No module named 'cv2'", "-m pip install opencv-python-headless'"),
        (
            "ImportError: cannot import name 'db' from 'backends' (/x/backends/__init__.py)",
            "the server has a package 'backends' as well: put yours beside model.py, or its folder into PYTHONPATH",
        ),
        ("ModuleNotFoundError: No module named 'kernel.rbf'", "the server has a package 'kernel' as well"),
        ("ModuleNotFoundError: No module named 'a.b'", "the module 'a' beside"),
        ("scheduler 'x' of package p cannot be imported from 'nomod:x': ModuleNotFoundError: No module named 'nomod'",
         "install 'nomod' for the Python of the server"),
        ("AttributeError: module '1.model' has no attribute 'TritonPythonModel'", "write a class TritonPythonModel"),
        ("autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified",
         "write max_batch_size: 0"),
        ("failed to read text proto from c: Enum type \"inference.DataType\" has no value named FP32.", "TYPE_FP32"),
        ("failed to read text proto from c: Enum type \"inference.DataType\" has no value named TYPE_BYTES.",
         "TYPE_STRING"),
        ("failed to read text proto from c: Enum type \"inference.DataType\" has no value named Q.", "datatypes are"),
        ("failed to read text proto from c: Message type \"inference.ModelConfig\" has no field named \"inputs\".",
         "did you mean 'input'?"),
        ("failed to read text proto from c: Message type \"inference.ModelDynamicBatching\" has no field named "
         "\"max_queue_delay\".", "did you mean 'max_queue_delay_microseconds'?"),
    ],
)  # fmt: skip
def test_an_error_is_explained(text: str, said: str) -> None:
    assert said in hint(text, folder("1", Entry("model.py")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "'1/model.onnx' is a pointer of Git LFS"),
        (b"", "'1/model.onnx' is empty"),
        (b"\x08\x08", "'1/model.onnx' is cut, or no ONNX file"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_looked_at(content: bytes, said: str) -> None:
    assert said in hint(CUT, folder("1", Entry("model.onnx")), first_bytes=content)


def test_an_error_that_nobody_has_thought_of_has_no_hint() -> None:
    assert hint("ValueError: no luck", folder("1", Entry("model.py"))) == ""
    assert hint(NO_BACKEND, Entry("model.onnx"), name="1") == ""
    assert hint('failed to read text proto from c: Expected "}".', folder("1")) == ""
