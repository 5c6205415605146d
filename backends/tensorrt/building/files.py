"""Where the files of a build go: into the folder of a model, as a model repository has it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

#: Suffixes of files; another output is the folder of a model.
_SUFFIXES = (".plan", ".engine", ".trt")


class OutputFiles(msgspec.Struct, frozen=True):
    """The files of a build."""

    plan: Path
    #: None if the plan does not lie in the version folder of a model.
    config: Path | None
    model: str


def output_files(output: Path | None, onnx_file: Path) -> OutputFiles:
    """Return where a build writes: a file, or `FOLDER/1/model.plan`; by default the folder has the ONNX file's name."""
    folder = output if output is not None else Path(onnx_file.stem)
    if folder.suffix not in _SUFFIXES:
        return OutputFiles(folder / "1" / "model.plan", folder / "config.pbtxt", folder.resolve().name)
    version = folder.resolve().parent
    if version.name.isdigit():
        return OutputFiles(folder, version.parent / "config.pbtxt", version.parent.name)
    return OutputFiles(folder, None, onnx_file.stem)


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that it never exists incomplete: a server may watch the folder. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
