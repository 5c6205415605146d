"""Finds a model's file and says which of PyTorch's formats it has. Only names inside the file are read.

A file is not judged by its name: as in Triton, `model.pt2` is used where there is no `model.pt`, and either may be
TorchScript. All formats are zip archives.
"""

from __future__ import annotations

import enum
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.errors import InternalError, InvalidArgument, Unavailable, Unsupported

if TYPE_CHECKING:
    from collections.abc import Collection

    from backends.base import ModelArguments

_DEFAULT, _SECOND = "model.pt", "model.pt2"


class FileFormat(enum.Enum):
    """What a file was written with."""

    TORCHSCRIPT = "torch.jit.save"
    EXPORTED = "torch.export.save"
    COMPILED = "torch._inductor.aoti_compile_and_package"


def find_model_file(arguments: ModelArguments, capability: tuple[int, int] | None = None) -> Path:
    """Return the path of the version's model file, for a GPU with this compute capability.

    Raises `InvalidArgument` for a name that leads out of the model's folder, and `Unavailable` with Triton's text if
    the file does not exist.
    """
    path = arguments.model_file(_DEFAULT, capability)
    if not path.is_file() and path.name == _DEFAULT:
        second = path.with_name(_SECOND)
        path = second if second.is_file() else path
    # Only the name is checked: the owner of the repository may link to files outside.
    path = Path(os.path.normpath(path))
    if not path.is_relative_to(os.path.normpath(arguments.model_dir)):
        raise InvalidArgument(f"model file '{path}' is outside the folder of model '{arguments.model_name}'")
    if not path.is_file():
        raise Unavailable(f"unable to find '{path}' for model instance '{arguments.model_name}'")
    return path


def read_format(path: Path, model: str) -> FileFormat:
    """Return the format of a model file. Raises `InternalError` or `Unsupported` if the file cannot be served."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise InternalError(
            f"failed to load model '{model}': '{path.name}' is neither TorchScript (torch.jit.save) nor an exported "
            f"program (torch.export.save): {error}"
        ) from error
    return format_of(names, path.name, model)


def format_of(names: Collection[str], file: str, model: str) -> FileFormat:
    """Return the format of an archive with these members; all of them are in one folder, whose name has no meaning.

    Raises `Unsupported` for pickles, and for archives of another kind.
    """
    inner = {name.partition("/")[2] for name in names}
    if any(name.startswith("data/aotinductor/") for name in inner):
        return FileFormat.COMPILED
    if "archive_format" in inner or "serialized_exported_program.json" in {*names, *inner}:
        return FileFormat.EXPORTED
    if "constants.pkl" in inner:
        return FileFormat.TORCHSCRIPT
    if "data.pkl" in inner:
        raise Unsupported(
            f"failed to load model '{model}': '{file}' was written by torch.save. It has weights or a pickle of Python "
            "objects, not a model. Write it with torch.export.save(torch.export.export(model, arguments), file) or "
            "torch.jit.script(model).save(file)"
        )
    raise Unsupported(
        f"failed to load model '{model}': '{file}' is an archive, but not of torch.jit.save or torch.export.save"
    )
