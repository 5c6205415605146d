"""Finds the file of a model in its version folder, and tells its format from its name or its first bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.fil.settings import FILE_NAMES
from kernel.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from backends.base import ModelArguments
    from backends.fil.settings import FilSettings

#: Names that are looked for if the configuration names neither file nor type: Triton's, MLServer's and KServe's.
_CANDIDATES = ("xgboost.json", "xgboost.ubj", "xgboost.model", "model.txt", "checkpoint.tl",
               "model.json", "model.ubj", "model.bst", "model.lgb")  # fmt: skip

_FIRST_BYTES = 64


def find_model_file(arguments: ModelArguments, settings: FilSettings) -> tuple[Path, str]:
    """Return the path of the model's file and its type, a key of `FILE_NAMES`. Raises `ServingError`."""
    folder = arguments.version_dir
    named = str(arguments.config.get("default_model_filename") or "")
    if named or settings.model_type:
        path = folder / (named or FILE_NAMES[settings.model_type])
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
            found = type_of_bytes(file.read(_FIRST_BYTES))
    except OSError as error:
        raise Unavailable(f"'{path}' of model '{model}' cannot be read: {error.strerror}") from error
    if not found:
        raise InvalidArgument(
            f"'{path}' of model '{model}' is no file of XGBoost (JSON, UBJSON), LightGBM (text) or Treelite "
            f"(checkpoint); if it is one, name its type in the parameter model_type ({', '.join(FILE_NAMES)})"
        )
    return found


def type_of_bytes(data: bytes) -> str:
    """Return the type of a file that begins with `data`, a key of `FILE_NAMES`; "" if it is none. Pure."""
    if data[:2] == b"{L" or data.startswith(b"{l"):  # an object whose first key has a length of 64 or 32 bits
        return "xgboost_ubj"
    if b"".join(data.split()).startswith(b'{"learner"'):
        return "xgboost_json"
    if data.startswith((b"tree\n", b"tree\r\n")):
        return "lightgbm"
    if data.startswith(b"binf"):
        return "xgboost"
    major, minor = int.from_bytes(data[:4], "little"), int.from_bytes(data[4:8], "little")
    if len(data) >= 12 and (major == 4 or (major, minor) == (3, 9)) and minor < 1000:
        return "treelite_checkpoint"
    return ""
