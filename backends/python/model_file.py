"""Imports a model's Python file, as Triton does.

The name of the module is `<version>.<file>`. The file can import modules from the folders of the version and of the
model, also with `from .helper import x`.

A model that is one function with annotated arguments: the class `TritonPythonModel` that stands for it.

Each argument is an input, and what the function returns are the outputs; their names and datatypes follow from the
annotations. The function gets one request at a time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
import types
import typing
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.python import triton_python_backend_utils as pb_utils
from backends.python.failures import model_code
from kernel.errors import InternalError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import ModelArguments

DEFAULT_NAME = "model.py"


def import_model_class(arguments: ModelArguments) -> type[Any]:
    """Import the model's file and return its class `TritonPythonModel`, or one that stands for its one function.

    Raises `InternalError` if the file or the class does not exist, or the file cannot be imported.
    """
    path = arguments.model_file(DEFAULT_NAME)
    if path.suffix != ".py":
        raise InternalError(f"Model name must end with '.py'. Model name is \"{path.name}\".")
    if not path.is_file():
        raise InternalError(f"Python model file not found in '{path}'")
    # At the end of the path, as in Triton: a file of the model must not hide a module of the standard library.
    for folder in (str(arguments.version_dir), str(arguments.model_dir)):
        if folder not in sys.path:
            sys.path.append(folder)
    # Models may import from the current folder, as in Triton, but it hides neither their own modules nor others.
    with contextlib.suppress(FileNotFoundError):  # it was removed
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())
    package = types.ModuleType(str(arguments.version))
    package.__path__ = [str(arguments.version_dir)]
    sys.modules[package.__name__] = package
    name = f"{package.__name__}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with model_code():
        spec.loader.exec_module(module)
        if not hasattr(module, "TritonPythonModel"):
            function = find_function(module)
            if function is not None:
                return model_class_of(function)
        model_class: type[Any] = module.TritonPythonModel
    return model_class


#: Python's type → datatype of an input or output with one element.
_SCALARS = {bool: "BOOL", int: "INT64", float: "FP64", str: "STRING", bytes: "STRING"}

#: NumPy's kinds and sizes → datatype. Texts are BYTES.
_NUMPY = {
    np.bool_: "BOOL", np.int8: "INT8", np.int16: "INT16", np.int32: "INT32", np.int64: "INT64", np.uint8: "UINT8",
    np.uint16: "UINT16", np.uint32: "UINT32", np.uint64: "UINT64", np.float16: "FP16", np.float32: "FP32",
    np.float64: "FP64", np.str_: "STRING", np.bytes_: "STRING", np.object_: "STRING",
}  # fmt: skip

#: The name of the one output of a function that names none.
OUTPUT = "output"


class FunctionTensor:
    """An argument or a result."""

    def __init__(self, name: str, annotation: Any, place: str) -> None:
        """`place` names it in errors. Raises `InvalidArgument` for an annotation that says no datatype."""
        self.name = name
        self.dims = [-1]
        if typing.get_origin(annotation) is getattr(typing, "Annotated", None):
            annotation, *more = typing.get_args(annotation)
            if more and isinstance(more[0], tuple):
                self.dims = [int(dim) for dim in more[0]]
        self.scalar = annotation if annotation in _SCALARS else None
        self.texts = False
        if self.scalar is not None:
            self.datatype, self.dims = _SCALARS[annotation], [1]
            return
        scalars = typing.get_args(annotation)[1:] if typing.get_origin(annotation) is np.ndarray else ()
        kind = (typing.get_args(scalars[0]) or (None,))[0] if scalars else None
        if kind not in _NUMPY:
            raise InvalidArgument(
                f"{place} has the annotation {annotation!r}, which says no datatype; expected numpy.typing.NDArray of "
                "a type such as numpy.float32 (with dims: Annotated[NDArray[numpy.float32], (4,)]), or bool, int, "
                "float, str, bytes"
            )
        self.datatype = _NUMPY[kind]
        self.texts = kind is np.str_

    def entry(self) -> dict[str, Any]:
        """Return it as an entry of a configuration."""
        return {"name": self.name, "data_type": f"TYPE_{self.datatype}", "dims": self.dims}

    def argument(self, tensor: Any) -> Any:
        """Return what the function gets for an input. Raises `ValueError`."""
        if self.scalar is None:
            array = tensor.as_numpy()
            return np.char.decode(array.astype(bytes)) if self.texts else array
        array = tensor.as_numpy().reshape(-1)
        if array.size != 1:
            raise ValueError(f"'{self.name}' has {array.size} elements, expected 1")
        return array[0].decode() if self.scalar is str else array[0] if self.scalar is bytes else array[0].item()

    def tensor(self, result: Any) -> Any:
        """Return an output for what the function has returned."""
        if self.datatype == "STRING":
            array = np.asarray(result, object)
            array = array.reshape(1) if self.scalar is not None else array
            texts = [each.encode() if isinstance(each, str) else each for each in array.reshape(-1)]
            encoded = np.empty(len(texts), object)
            encoded[:] = texts
            return pb_utils.Tensor(self.name, encoded.reshape(array.shape))
        array = np.asarray(result, pb_utils.triton_string_to_numpy(f"TYPE_{self.datatype}"))
        return pb_utils.Tensor(self.name, array.reshape(1) if self.scalar is not None else array)


class PlainFunction:
    """A function with its inputs and outputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises `InvalidArgument` for annotations that are missing or not understood."""
        self.function = function
        name = function.__name__
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except (NameError, TypeError) as error:
            raise InvalidArgument(f"the annotations of function '{name}' cannot be read: {error}") from error
        parameters = inspect.signature(function).parameters
        missing = [each for each in (*parameters, "return") if each not in hints]
        if missing:
            what = "what it returns" if missing[0] == "return" else f"argument '{missing[0]}'"
            raise InvalidArgument(f"function '{name}' has no annotation for {what}")
        self.optional = {each.name for each in parameters.values() if each.default is not inspect.Parameter.empty}
        self.inputs = [
            FunctionTensor(each, hints[each], f"argument '{each}' of function '{name}'") for each in parameters
        ]
        self.several, self.outputs = _outputs(name, hints["return"])

    def call(self, request: Any) -> Any:
        """Return the response to a request. What the function says of wrong values (`ValueError`) is INVALID_ARG."""
        given = {}
        for each in self.inputs:
            tensor = pb_utils.get_input_tensor_by_name(request, each.name)
            if tensor is not None:
                given[each.name] = each.argument(tensor)
        result = self.function(**given)
        results = tuple(result) if self.several else (result,)
        if len(results) != len(self.outputs):
            raise TypeError(
                f"function '{self.function.__name__}' returned {len(results)} values, its annotation has "
                f"{len(self.outputs)}"
            )
        return pb_utils.InferenceResponse([each.tensor(found) for each, found in zip(self.outputs, results)])


def _outputs(name: str, annotation: Any) -> tuple[bool, list[FunctionTensor]]:
    """Return whether the function returns several values, and its outputs."""
    place = f"what function '{name}' returns"
    if isinstance(annotation, type) and issubclass(annotation, tuple) and hasattr(annotation, "_fields"):
        fields = typing.get_type_hints(annotation, include_extras=True)
        return True, [FunctionTensor(each, fields.get(each), place) for each in fields]
    if typing.get_origin(annotation) is tuple:
        parts = typing.get_args(annotation)
        return True, [FunctionTensor(f"{OUTPUT}_{index}", each, place) for index, each in enumerate(parts)]
    return False, [FunctionTensor(OUTPUT, annotation, place)]


def find_function(module: types.ModuleType) -> Callable[..., Any] | None:
    """Return the one public function that a module defines, if all of its arguments have annotations; else None."""
    own = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    if len(own) != 1 or not own[0].__annotations__:
        return None
    return own[0]


def model_class_of(function: Callable[..., Any]) -> type[Any]:
    """Return a class `TritonPythonModel` whose requests call `function`. Raises `InvalidArgument`."""
    plain = PlainFunction(function)

    class FunctionModel:
        """What the server calls. Its configuration is completed from the function."""

        @staticmethod
        def auto_complete_config(config: Any) -> Any:
            completed = config.as_dict()
            for entry, add in ((plain.inputs, config.add_input), (plain.outputs, config.add_output)):
                if completed["input" if add == config.add_input else "output"]:
                    continue
                for each in entry:
                    optional = {"optional": True} if each.name in plain.optional else {}
                    add({**each.entry(), **optional})
            return config

        def execute(self, requests: Sequence[Any]) -> list[Any]:
            responses = []
            for request in requests:
                try:
                    responses.append(plain.call(request))
                except ValueError as error:  # noqa: PERF203 - one try for all would fail the whole batch
                    failure = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
                    responses.append(pb_utils.InferenceResponse(error=failure))
            return responses

    return FunctionModel
