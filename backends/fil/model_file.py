"""Finds the file of a model in its version folder, and tells its format from its name or its first bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument, Unavailable
from kernel.tree_files import TREE_FILE_NAMES, TREE_HEAD_BYTE_SIZE, tree_file_type

if TYPE_CHECKING:
    from pathlib import Path

    from backends.base import ModelArguments
    from backends.fil.settings import FilSettings

#: Names that are looked for if the configuration names neither file nor type: Triton's, MLServer's and KServe's.
_CANDIDATES = ("xgboost.json", "xgboost.ubj", "xgboost.model", "model.txt", "checkpoint.tl",
               "model.json", "model.ubj", "model.bst", "model.lgb")  # fmt: skip


def find_model_file(arguments: ModelArguments, settings: FilSettings) -> tuple[Path, str]:
    """Return the path of the model's file and its type, a key of `TREE_FILE_NAMES`. Raises `ServingError`."""
    folder = arguments.version_dir
    named = str(arguments.config.get("default_model_filename") or "")
    if named or settings.model_type:
        path = folder / (named or TREE_FILE_NAMES[settings.model_type])
        if not path.is_file():
            raise Unavailable(f"unable to find '{path}' for model '{arguments.model_name}'")
    else:
        present = [folder / name for name in _CANDIDATES if (folder / name).is_file()]
        if not present:
            raise Unavailable(
                f"unable to find a file for model '{arguments.model_name}' in '{folder}': expected one of "
                f"{', '.join(_CANDIDATES)}, or default_model_filename in the configuration"
            )
        path = present[0]
    return path, settings.model_type or _type_of(path, arguments.model_name)


def _type_of(path: Path, model: str) -> str:
    """Return the type of a file by its content. Raises `InvalidArgument`."""
    try:
        with path.open("rb") as file:
            found = tree_file_type(file.read(TREE_HEAD_BYTE_SIZE))
    except OSError as error:
        raise Unavailable(f"'{path}' of model '{model}' cannot be read: {error.strerror}") from error
    if not found and path.name == TREE_FILE_NAMES["xgboost"]:
        return "xgboost"  # files of very old versions begin with a number
    if not found:
        raise InvalidArgument(
            f"'{path}' of model '{model}' is no file of XGBoost (JSON, UBJSON), LightGBM (text) or Treelite "
            f"(checkpoint); if it is one, name its type in the parameter model_type ({', '.join(TREE_FILE_NAMES)})"
        )
    return found
