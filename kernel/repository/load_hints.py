"""Hints for models that cannot be loaded, by the text of the error and the listing of the model's folder. Pure.

A hint is one sentence that says what to do. The errors themselves are Triton's. Words in a configuration that do not
exist (backends, datatypes, fields, platforms) have hints of their own.
"""

from __future__ import annotations

import difflib
import posixpath
import re
import sys
from typing import TYPE_CHECKING

import msgspec

from kernel.config.autofill import FORMATS
from kernel.config.generated import model_config_pb2
from kernel.repository.path_hints import CONFIG_FILENAME, MODEL_ENDINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from google.protobuf.descriptor import Descriptor

    from kernel.repository.layout import Entry, ModelFolder

#: The first bytes of the file that Git LFS leaves where it has not fetched the real one.
_LFS = b"version https://git-lfs"

#: Texts for a model whose file has a fixed first dimension, without and with dims in its configuration.
_NO_BATCHING = (
    "model does not support batching while non-zero max_batch_size is specified",
    "for the model to support batching the shape should have at least 1 dimension",
)

#: Modules that are in packages of another name.
_PACKAGES = {
    "cv2": "opencv-python-headless", "PIL": "pillow", "sklearn": "scikit-learn", "skimage": "scikit-image",
    "yaml": "pyyaml",
}  # fmt: skip

_CLASS = "TritonPythonModel"


class Failure(msgspec.Struct, frozen=True):
    """A load that has failed, and what hints are made of."""

    folder: ModelFolder
    #: The text of the error.
    text: str
    #: The backends of the server.
    backends: Collection[str]
    #: Returns the first bytes of a file in the model's folder, by its path in it; b"" if it cannot be read.
    first_bytes: Callable[[str], bytes]


def load_hint(failure: Failure) -> str:
    """Return the hint for a failed load; empty if there is none for this error."""
    for find in _HINTS:
        if hint := find(failure):
            return hint
    return ""


def _misspelt_config(failure: Failure) -> str:
    """A file that was meant to be config.pbtxt."""
    entry = failure.folder.entry
    if entry.child(CONFIG_FILENAME) is not None:
        return ""
    names = [each.name for each in entry.children if not each.is_folder]
    close = [name for name in names if name.startswith("config.") or name.lower() == CONFIG_FILENAME]
    close = close or difflib.get_close_matches(CONFIG_FILENAME, names, n=1, cutoff=0.8)
    return f"the configuration is read from config.pbtxt: rename '{close[0]}'" if close else ""


def _no_version(failure: Failure) -> str:
    """No folder of a version, or none that the policy chooses."""
    folder, text = failure.folder, failure.text
    if folder.name.isdecimal():  # the version of a model that was given as a repository: there is a hint for that
        return ""
    undetermined = "Could not determine backend" in text and not folder.versions
    if "at least one version must be available under the version policy" not in text and not undetermined:
        return ""
    if folder.versions:
        return f"the model has {_versions(folder)}, and the version_policy in config.pbtxt chooses none of them"
    file = _model_file(folder.entry)
    if file:
        return f"'{file}' is in the model's folder: put it into a folder of a version, {_path(folder, '1', file)}"
    strange = next((each.name for each in folder.entry.children if each.is_folder and _model_file(each)), "")
    inside = [each.name for each in folder.entry.children if each.is_folder and _is_model(each)]
    if inside:
        shown = f"'{inside[0]}'{' and others' if len(inside) > 1 else ''}"
        return f"it is a folder of models, with {shown}: give it as a repository of its own"
    if strange:
        return f"folders of versions have whole numbers as names: rename '{strange}' to '1'"
    return f"the model has no folder of a version: put its files into {_path(folder, '1')}"


def _is_model(entry: Entry) -> bool:
    """Whether a folder within what should be a model is a model itself."""
    return entry.child(CONFIG_FILENAME) is not None or any(
        each.is_folder and each.name.isdecimal() for each in entry.children
    )


def _no_file(failure: Failure) -> str:
    """The file of the model is not where the backend looks for it."""
    text, folder = failure.text, failure.folder
    missing = re.search(r"(?:unable to find '|Python model file not found in ')([^']+)'", text)
    if missing is None and "Could not determine backend" not in text:
        return ""
    version = _version_folder(folder, missing[1] if missing else "")
    if version is None:
        return ""
    wanted = posixpath.basename(missing[1]) if missing else ""
    there = _model_file(version, posixpath.splitext(wanted)[1])
    where = _path(folder, version.name)
    if there and wanted:
        return f"{where} has '{there}': rename it to '{wanted}', or write default_model_filename: \"{there}\""
    if there:
        expected = next((each for each in FORMATS if each.filename.endswith(posixpath.splitext(there)[1])), None)
        return f"{where} has '{there}': rename it to '{expected.filename}'" if expected else ""
    if not version.children:
        return f"{where} is empty: put the model's file into it{f', {wanted!r}' if wanted else ''}"
    names = ", ".join(f"'{each.name}'" for each in version.children[:5])
    return f"{where} has only {names}{', and no ' + wanted if wanted else ', and no file of a model'}"


def _unknown_backend(failure: Failure) -> str:
    name = re.search(r"unable to find backend library for backend '([^']*)'", failure.text)
    if name is not None:
        return backend_hint(name[1], failure.backends)
    platform = re.search(r"unexpected platform type '([^']*)'", failure.text)
    return platform_hint(platform[1]) if platform is not None else ""


def _other_name(failure: Failure) -> str:
    names = re.search(r"unexpected directory name '([^']*)' for model '([^']*)'", failure.text)
    if names is None:
        return ""
    return f"config.pbtxt says name: \"{names[2]}\": leave that line out, or rename the folder to '{names[2]}'"


def _wrong_config(failure: Failure) -> str:
    return parse_hint(failure.text) if "failed to read text proto" in failure.text else ""


#: Triton's text for `gpus: [0]`, which lists the GPUs of the server: here none.
_NONE_OF_NONE = re.compile(r"unsupported gpu id \d+\. GPUs with [^:]* are: ?;?\s*$")


def _no_gpu(failure: Failure) -> str:
    no_gpus = "has kind KIND_GPU but no GPUs are available" in failure.text or _NONE_OF_NONE.search(failure.text)
    if not no_gpus:
        return ""
    return (
        "this server uses no GPUs: write kind: KIND_CPU without gpus in instance_group, or leave instance_group out; "
        "to try all models on the CPU as they are, start the server with --gpu-kind=cpu"
    )


def _engine(failure: Failure) -> str:
    """An engine of TensorRT where no GPU is: without one, not even its tensors are known."""
    version = _version_folder(failure.folder, "")
    file = _model_file(version, ".plan") if version is not None else ""
    unread = "model configuration is not provided" in failure.text and bool(file)
    if not unread and "TensorRT backend supports only GPU device" not in failure.text:
        return ""
    return (
        f"'{file or 'model.plan'}' is an engine of TensorRT, which is read and executed only on a GPU; without one, "
        "serve the ONNX file that it was built from"
    )


#: The packages of the server, which are found where the model's own of that name are not.
_OUR_NAMES = frozenset({"backends", "kernel", "protocols", "schedulers", "shm"})


def _missing_module(failure: Failure) -> str:
    module = re.search(
        r"ModuleNotFoundError: No module named '([\w.]+)'|ImportError: cannot import name '\w+' from '([\w.]+)'",
        failure.text,
    )
    if module is None:
        return ""
    top = (module[1] or module[2]).partition(".")[0]
    if top in _OUR_NAMES:  # a model of a program that has such a package too
        return (
            f"the server has a package '{top}' as well: put yours beside model.py, or its folder into PYTHONPATH when "
            "you start the server"
        )
    if not module[1]:
        return ""
    package = _PACKAGES.get(top, top)
    if "cannot be imported from '" in failure.text:  # by a package that extends the server, not by the model
        return f"install '{package}' for the Python of the server, '{sys.executable} -m pip install {package}'"
    return (
        f"install '{package}' for the Python that runs the model, '{sys.executable} -m pip install {package}', or put "
        f"the module '{top}' beside model.py"
    )


def _no_class(failure: Failure) -> str:
    if f"has no attribute '{_CLASS}'" not in failure.text:
        return ""
    return f"write a class {_CLASS} with a method execute(self, requests) into the file of the model"


def _cut_file(failure: Failure) -> str:
    """A file with the name of an ONNX file and other contents."""
    if not re.search(r"Protobuf parsing failed|INVALID_PROTOBUF|ModelProto does not have a graph", failure.text):
        return ""
    path = re.search(r"/([^/ ]+/[^/ ]+\.onnx)\b", failure.text)
    name = path[1] if path else _newest_onnx(failure.folder)
    head = failure.first_bytes(name)
    if head.startswith(_LFS):
        return f"'{name}' is a pointer of Git LFS, not the model: fetch the model with 'git lfs pull'"
    if not head:
        return f"'{name}' is empty: copy the model again"
    return f"'{name}' is cut, or no ONNX file: copy the model again and compare the sizes"


def _fixed_batch(failure: Failure) -> str:
    if not any(text in failure.text for text in _NO_BATCHING):
        return ""
    return "the file has a fixed batch size: write max_batch_size: 0, and all dimensions in dims"


def _other_dims(failure: Failure) -> str:
    if "dimensions (shape" not in failure.text or "but the model configuration specifies" not in failure.text:
        return ""
    return (
        "dims in config.pbtxt leave the batch dimension out where max_batch_size is above 0; without the entries of "
        "input and output the server reads them from the file"
    )


#: In this order; the first that fits is the hint.
_HINTS = (
    _wrong_config,
    _other_name,
    _unknown_backend,
    _no_gpu,
    _engine,
    _missing_module,
    _no_class,
    _cut_file,
    _fixed_batch,
    _other_dims,
    _misspelt_config,
    _no_version,
    _no_file,
)


# ---- the model's folder ----------------------------------------------------------------------


def _path(folder: ModelFolder, *parts: str) -> str:
    return f"'{posixpath.join(folder.path, *parts)}'"


def _versions(folder: ModelFolder) -> str:
    numbers = ", ".join(map(str, folder.versions))
    return f"version {numbers}" if len(folder.versions) == 1 else f"versions {numbers}"


def _version_folder(folder: ModelFolder, path: str) -> Entry | None:
    """Return the folder of the version in which `path` is; without a path the folder of the newest version."""
    parts = path.split("/")
    for entry in folder.versions.values():
        if entry.name in parts[-2:-1]:
            return entry
    return max(folder.versions.items())[1] if folder.versions else None


def _model_file(folder: Entry, ending: str = "") -> str:
    """Return a file of `folder` that can be a model, with this ending if it is not empty; "" for none."""
    endings = (ending,) if ending else MODEL_ENDINGS
    return next((each.name for each in folder.children if each.name.endswith(endings)), "")


def _newest_onnx(folder: ModelFolder) -> str:
    version = _version_folder(folder, "")
    return posixpath.join(version.name, _model_file(version, ".onnx")) if version is not None else ""


#: What people call a backend.
_MEANT = {
    "onnx": "onnxruntime",
    "onnxruntime_onnx": "onnxruntime",
    "ort": "onnxruntime",
    "libtorch": "pytorch",
    "torch": "pytorch",
    "py": "python",
    "numpy": "python",
}

#: Triton's backends for formats that can be written as ONNX, and what writes it.
_TO_ONNX = {
    "tensorflow": "tf2onnx",
    "openvino": "the framework that the model was made with",
    "tensorrt": "the framework that the model was made with",
}

#: Triton's other backends, and what to do about their models (docs/moving-from-triton.md).
_OTHER_BACKENDS = {
    "dali": "run the pipeline in a Python model, or write it as ONNX",
    "vllm": "put NVIDIA's backend into a folder and give that as --backend-directory (docs/vllm.md)",
    "tensorrtllm": "keep its models on Triton, since the backend is C++",
}

#: Other words for datatypes → the word of config.pbtxt.
_DATATYPES = {
    "FLOAT": "FP32", "FLOAT32": "FP32", "DOUBLE": "FP64", "FLOAT64": "FP64", "HALF": "FP16", "FLOAT16": "FP16",
    "BFLOAT16": "BF16", "INT": "INT32", "LONG": "INT64", "BYTES": "STRING", "STR": "STRING", "BOOLEAN": "BOOL",
}  # fmt: skip

_NO_VALUE = re.compile(r'Enum type "[\w.]+\.DataType" has no value named "?(\w+)"?')

_NO_FIELD = re.compile(r'Message type "(?:[\w.]+\.)?(\w+)" has no field named "(\w+)"')


def backend_hint(name: str, backends: Collection[str]) -> str:
    """Return the hint for a backend that the server does not have; `backends` are those that it has."""
    if name in _TO_ONNX:
        return (
            f"this server has no backend '{name}'; write the model as ONNX with {_TO_ONNX[name]}, or run it in a "
            "Python model"
        )
    if name in _OTHER_BACKENDS:
        return f"this server has no backend '{name}': {_OTHER_BACKENDS[name]}"
    lower = name.lower()
    meant = _MEANT.get(lower) or next(iter(difflib.get_close_matches(lower, backends, n=1)), "")
    suggestion = f"; did you mean '{meant}'?" if meant in backends else ""
    return (
        f"this server has the backends {', '.join(sorted(backends))}; others are a backend.py beside the model or in "
        f"--backend-directory, or packages{suggestion}"
    )


def platform_hint(name: str) -> str:
    """Return the hint for a platform that does not exist."""
    backend = _MEANT.get(name.lower(), name.lower())
    known = {each.platform: each.backend for each in FORMATS}
    if backend in known.values():
        return f'write backend: "{backend}" in place of platform: "{name}"'
    return 'leave the line \'platform\' out and write backend: "onnxruntime" or backend: "python"'


def parse_hint(reason: str) -> str:
    """Return the hint for a config.pbtxt that cannot be parsed, by protobuf's text."""
    value = _NO_VALUE.search(reason)
    if value is not None:
        return _datatype_hint(value[1])
    field = _NO_FIELD.search(reason)
    if field is None:
        return ""
    names = _fields(field[1])
    begun = [name for name in names if name.startswith(f"{field[2]}_")]
    close = begun or difflib.get_close_matches(field[2], names, n=1, cutoff=0.7)
    return f"did you mean '{close[0]}'?" if close else ""


def _datatype_hint(given: str) -> str:
    known = model_config_pb2.DataType.keys()
    bare = given.upper().removeprefix("TYPE_")
    meant = f"TYPE_{_DATATYPES.get(bare, bare)}"
    if meant not in known:
        meant = next(iter(difflib.get_close_matches(meant, known, n=1, cutoff=0.8)), "")
    return f"the datatype is called {meant}" if meant else f"datatypes are {', '.join(known[1:])}"


def _fields(message: str) -> list[str]:
    """Return the names of the fields of a message of the configuration, also of one inside another."""
    for descriptor in _descriptors():
        if descriptor.name == message:
            return [field.name for field in descriptor.fields]
    return []


def _descriptors() -> list[Descriptor]:
    found: list[Descriptor] = list(model_config_pb2.DESCRIPTOR.message_types_by_name.values())
    for descriptor in found:  # grows while it is read
        found.extend(descriptor.nested_types)
    return found
