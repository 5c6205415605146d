"""Reads the file `MLmodel` of a folder that MLflow has written: flavour, model file, signature. MLflow is not needed.

What the file says is a proposal of whoever wrote it: a model file must be in the folder, and no class or function is
imported by a name in it.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from backends.mlflow.library import yaml_library
from backends.mlflow.signature import ModelSignature, read_signature
from kernel.errors import InvalidArgument, Unavailable, Unsupported

if TYPE_CHECKING:
    from pathlib import Path

    from backends.base import ModelArguments

MLMODEL = "MLmodel"

#: Flavour → the fields that may have the name of its model file, and the name where none has.
_FILE_FIELDS = {
    "lightgbm": (("data",), "model.lgb"),
    "onnx": (("data",), "model.onnx"),
    "pytorch": (("model_data",), "data"),
    "sklearn": (("pickled_model",), "model.pkl"),
    "xgboost": (("data",), "model.xgb"),
}

#: The flavours that are served without the package mlflow.
FLAVOURS = tuple(sorted(_FILE_FIELDS))

#: The flavour of all other models: the package mlflow loads them, by the `loader_module` that the file names.
PYFUNC = "python_function"

#: The flavours whose `predict` gets the signature's params from MLflow, though it may know none.
_PASS_PARAMS = ("pytorch", "xgboost")

#: The parameter of Python models with an environment of their own.
_ENVIRONMENT = "EXECUTION_ENV_PATH"

#: The most bytes of an `MLmodel` file: a signature of some ten thousand columns.
_MAX_BYTE_SIZE = 4 << 20


class MlflowModel(msgspec.Struct, frozen=True):
    """What an `MLmodel` file says."""

    #: One of `FLAVOURS`, or `PYFUNC`.
    flavour: str
    #: The path of the model file or folder, in the version's folder; "" for `PYFUNC`.
    filename: str
    #: The fields of the flavour.
    fields: dict[str, Any]
    #: The method that `mlflow.pyfunc` calls for `predict`.
    method: str
    signature: ModelSignature


def read_model_folder(arguments: ModelArguments) -> MlflowModel:
    """Read the `MLmodel` file of a version. Raises `ServingError`."""
    if arguments.parameter(_ENVIRONMENT):
        raise Unsupported(
            f"model '{arguments.model_name}' names an environment of its own (parameter {_ENVIRONMENT}), which only "
            "Python models can have: the backend 'mlflow' loads folders in the Python of the server. A model.py of a "
            "few lines that calls mlflow.pyfunc.load_model serves this folder in an environment of its own "
            "(docs/mlflow.md)"
        )
    path = arguments.version_dir / MLMODEL
    return parse_mlmodel(_text(path, arguments.model_name), arguments.model_name)


def _text(path: Path, model: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTE_SIZE + 1)
    except OSError as error:
        raise Unavailable(
            f"unable to find '{path}' for model '{model}': {error.strerror}. The version's folder is expected to be "
            f"what mlflow's save_model has written, with the file {MLMODEL}"
        ) from error
    if len(data) > _MAX_BYTE_SIZE:
        raise InvalidArgument(f"'{path}' of model '{model}' has more than {_MAX_BYTE_SIZE} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{path}' of model '{model}' is not UTF-8: {error}") from None


def parse_mlmodel(text: str, model: str) -> MlflowModel:
    """Return what the text of an `MLmodel` file says. Raises `ServingError`."""
    yaml = yaml_library()
    try:
        found = yaml.load(text, _loader(yaml))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InvalidArgument(f"the file {MLMODEL} of model '{model}' cannot be read as YAML: {reason}") from None
    flavours = found.get("flavors") if isinstance(found, dict) else None
    if not isinstance(flavours, dict) or not all(isinstance(each, dict) for each in flavours.values()):
        raise InvalidArgument(
            f"the file {MLMODEL} of model '{model}' has no mapping 'flavors', which every file of MLflow has"
        )
    general = flavours.get("python_function", {})
    flavour = _flavour(flavours, general, model)
    fields = flavours[flavour]
    names, default = _FILE_FIELDS.get(flavour, ((), ""))
    filename = next((text for name in names if (text := _text_in(fields, name, model))), default)
    _text_in(fields, "model_class", model)
    where = PurePosixPath(filename)
    if where.is_absolute() or ".." in where.parts:
        raise InvalidArgument(
            f"the file {MLMODEL} of model '{model}' names the model file '{filename}'; expected a path in the folder"
        )
    method = _text_in(general, "predict_fn", model) or "predict"
    signature = read_signature(found.get("signature"), model)
    if signature.has_params and flavour in _PASS_PARAMS:  # the other flavours ignore them, in MLflow, too
        raise Unsupported(
            f"the signature of model '{model}' has params, which requests cannot give here. Save the model without "
            "them, or call it in a Python model"
        )
    return MlflowModel(flavour, filename, fields, method, signature)


def _loader(yaml: Any) -> Any:
    """Return the class that reads a file. It makes nothing but plain values, and refuses merged mappings, which MLflow
    does not write: a few lines of them can have billions of keys."""
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]  # it is known at run time only
        def flatten_mapping(self, node: Any) -> None:
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    raise yaml.constructor.ConstructorError(None, None, "merged mappings (<<) are refused")

    return Loader


def _text_in(fields: dict[str, Any], name: str, model: str) -> str:
    """Return a text of a mapping; "" if it has none. Raises `InvalidArgument` for a value that is no text.

    The error does not show the value: with aliases, a few lines can be a list of billions of elements.
    """
    value = fields.get(name) or ""
    if not isinstance(value, str):
        raise InvalidArgument(
            f"'{name}' in the file {MLMODEL} of model '{model}' is a {type(value).__name__}; expected a text"
        )
    return value


def _flavour(flavours: dict[str, Any], general: dict[str, Any], model: str) -> str:
    """Return the flavour that `mlflow.pyfunc` would load, one of `FLAVOURS`, or `PYFUNC`. Raises `Unsupported`."""
    loader = _text_in(general, "loader_module", model)
    chosen = loader.removeprefix("mlflow.") if loader else next((each for each in FLAVOURS if each in flavours), "")
    if chosen in FLAVOURS and chosen in flavours:
        return chosen
    if loader:
        return PYFUNC
    shown = ", ".join(str(each) for each in flavours) or "none"
    raise Unsupported(
        f"model '{model}' has the MLflow flavours {shown} and is not supported: supported are the flavours "
        f"{', '.join(FLAVOURS)}, and those with a flavour {PYFUNC} that has a loader_module"
    )
